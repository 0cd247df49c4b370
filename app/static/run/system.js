// How busy the machine was: fetched and drawn while it is shown.
import { inTurn, insisted, pause } from 'http'
import { createPlot } from 'charts'
import { Points } from 'points'
import { still } from 'dom_updates'

/** From one fetch to the next: so much of the run as a point of a device stands for, within limits. */
const REFRESH = { least: 5000, share: 0.002, most: 60_000 } // ms
const ROW = 110 // pixels
const GAP = 34 // pixels: the row's title stands there
const MARGIN = { l: 62, r: 22, t: 30, b: 42 }
const LINES = ['lr', 'loss', 'scale', 'val', 'norm'] // the host's colour first
/** Title, column, and by what it is divided. @type {[string, 'utilization'|'memory_bytes'|'power_watts'|'temperature_celsius', number][]} */
const ROWS = [['Utilization, %', 'utilization', 0.01], ['Memory, GiB', 'memory_bytes', 2 ** 30], ['Power, W', 'power_watts', 1], ['Temperature, °C', 'temperature_celsius', 1]]
const MILLISECOND = 1000 // microseconds

/** @typedef {{device: number, elapsed_ms: number[], utilization: (number|null)[], memory_bytes: (number|null)[], power_watts: (number|null)[], temperature_celsius: (number|null)[]}} Device */

/** What steps took, by the second in which they ended, as far as it is known; of many their means. @param {Points} points @param {number} each examples of a step, 0 where it is not known @param {Record<string, string>} colors @returns {[string, any[]][]} */
const paces = (points, each, colors) => {
  const of = (name, said, color) => {
    const { x, y } = points.means[name] ?? points.lines[name]
    return { x: points.x(x, 'time'), y: y.map(said), name, color: colors[color] }
  }
  const scaled = (by) => (us) => (us === null ? null : us / by)
  /** @type {[string, any[]][]} */
  const rows = [
    ['Step, ms (faint), and of it waiting for data', [{ ...of('step_us', scaled(MILLISECOND), 'data'), name: 'step', opacity: 0.4 }, ...(points.hasWaits ? [{ ...of('data_us', scaled(MILLISECOND), 'data'), name: 'waiting' }] : [])]],
    ['Examples/s', each ? [{ ...of('step_us', (us) => (us ? each / us * 1e6 : null), 'val'), name: 'examples/s' }] : []],
  ]
  return rows.filter(([, lines]) => lines[0]?.x.length)
}

/** @param {{devices: Device[], points: Points, each: number}} wanted @param {Record<string, string>} colors */
const systemFigure = ({ devices, points, each }, colors) => {
  const known = ROWS.filter(([, column]) => devices.some((device) => device[column].some((value) => value !== null)))
  const paced = paces(points, each, colors)
  const rows = [...known, ...paced]
  const inner = rows.length * ROW + (rows.length - 1) * GAP
  const tops = rows.map((_, i) => 1 - i * (ROW + GAP) / inner)
  const data = known.flatMap(([, column, unit], i) => devices.map((device, j) => ({
    x: device.elapsed_ms.map((ms) => ms / 1000), y: device[column].map((value) => (value === null ? null : value / unit)),
    name: device.device < 0 ? 'host' : `GPU ${device.device}`, legendgroup: device.device, showlegend: i === 0,
    type: 'scatter', mode: 'lines', yaxis: `y${i ? i + 1 : ''}`, hovertemplate: '%{y:.4~g}', line: { width: 1.6, color: colors[LINES[j % LINES.length]] },
  })))
  paced.forEach(([, lines], i) => {
    for (const { color, ...line } of lines) {
      data.push({ ...line, showlegend: false, type: 'scatter', mode: 'lines', yaxis: `y${known.length + i ? known.length + i + 1 : ''}`, hovertemplate: '%{y:.4~g}', line: { width: 1.6, color } })
    }
  })
  const axes = tops.map((top, i) => [`yaxis${i ? i + 1 : ''}`,
    { domain: [Math.max(top - ROW / inner, 0), top], gridcolor: colors.grid, zeroline: false, rangemode: 'tozero', nticks: 4, fixedrange: true }])
  const layout = {
    margin: MARGIN, height: inner + MARGIN.t + MARGIN.b, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, hovermode: 'x unified', uirevision: 'same',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    legend: { orientation: 'h', x: 1, xanchor: 'right', y: 1, yanchor: 'bottom', font: { color: colors.text } },
    xaxis: { title: { text: 'seconds since the start', standoff: 6 }, gridcolor: colors.grid, zeroline: false, anchor: `y${rows.length > 1 ? rows.length : ''}` },
    annotations: rows.map(([title], i) => ({
      text: title, x: 0, xref: 'paper', xanchor: 'left', y: tops[i], yref: 'paper', yanchor: 'bottom', yshift: 3, showarrow: false, font: { color: colors.text, size: 12.5 },
    })),
    ...Object.fromEntries(axes),
  }
  return { data, layout, drawn: devices.reduce((sum, device) => sum + device.elapsed_ms.length, 0) }
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createSystem = (section, api) => {
  const plot = createPlot(section.querySelector('[data-system-plot]'), systemFigure)
  const refresh = inTurn(async () => {
    if (!section.clientWidth) return // it is hidden
    const [{ devices }, page] = await Promise.all(['system', 'series?points=1000'].map(async (part) => (await insisted(`${api}/${part}`)).json()))
    const points = new Points(page)
    const length = Math.max(0, ...devices.map((device) => device.elapsed_ms.at(-1)))
    if (devices.length || points.total) {
      still(() => {
        section.querySelector('[data-none]').hidden = true
        section.querySelector('[data-system-plot]').hidden = false
      })
      plot.draw({ devices, points, each: Number(section.dataset.examples ?? 0) })
    }
    await pause(Math.min(Math.max(REFRESH.least, REFRESH.share * length), REFRESH.most))
  })
  return { refresh }
}
