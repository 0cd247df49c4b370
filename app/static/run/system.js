// How busy the machine was: fetched and drawn while it is in view.
import { inTurn, insisted, pause } from 'http'
import { linearAxis } from 'axis'
import { createPlot } from 'charts'
import { withPauses } from 'decimation'
import { number } from 'formats'
import { still } from 'dom_updates'

/** Interval of fetches: the part of the run that a point of a device covers, within limits. */
const REFRESH = { least: 5000, share: 0.002, most: 60_000 } // ms
const ROW = 110 // pixels
const GAP = 34 // pixels: the row's title stands there
const MARGIN = { l: 62, r: 22, t: 30, b: 42 }
const LINES = ['lr', 'loss', 'scale', 'val', 'norm'] // the host's colour first
/** Title, column and divisor of each chart. @type {[string, Column, number][]} */
const ROWS = [
  ['Utilization, %', 'utilization', 0.01],
  ['Memory, GiB', 'memory_bytes', 2 ** 30],
  ['Memory of the script, GiB', 'process_memory_bytes', 2 ** 30],
  ['Disk, MiB/s', 'disk_bytes_per_second', 2 ** 20],
  ['Network, MiB/s', 'network_bytes_per_second', 2 ** 20],
  ['Power, W', 'power_watts', 1],
  ['Temperature, °C', 'temperature_celsius', 1],
]

/**
 * @typedef {'utilization'|'memory_bytes'|'process_memory_bytes'|'disk_bytes_per_second'|'network_bytes_per_second'|'power_watts'|'temperature_celsius'} Column
 */
/** @typedef {{device: number, elapsed_ms: number[]} & Record<Column, (number|null)[]>} Device */

/** @param {Device[]} devices @param {Record<string, string>} colors */
const systemFigure = (devices, colors) => {
  const rows = ROWS.filter(([, column]) => devices.some((device) => device[column].some((value) => value !== null)))
  const inner = rows.length * ROW + (rows.length - 1) * GAP
  const tops = rows.map((_, i) => 1 - (i * (ROW + GAP)) / inner)
  const firstRow = (device) => rows.findIndex(([, column]) => device[column].some((value) => value !== null))
  const pauses = devices.map(({ elapsed_ms: times }) => withPauses(times))
  /** @param {Device} device @param {Column} column @param {number} j */
  const valuesOf = (device, column, j) => pauses[j].places.map((place) => device[column][place] ?? null)
  const data = rows.flatMap(([, column, unit], i) =>
    devices.flatMap((device, j) =>
      device[column].every((value) => value === null)
        ? []
        : {
            x: pauses[j].times.map((ms) => ms / 1000),
            y: valuesOf(device, column, j).map((value) => (value === null ? null : value / unit)),
            name:
              device.device < -1 ? `rank ${-1 - device.device}` : device.device < 0 ? 'host' : `GPU ${device.device}`,
            legendgroup: device.device,
            showlegend: i === firstRow(device),
            type: 'scatter',
            mode: 'lines',
            connectgaps: false,
            yaxis: `y${i ? i + 1 : ''}`,
            text: valuesOf(device, column, j).map((value) => (value === null ? '' : number(value / unit))),
            hovertemplate: '%{text}',
            line: { width: 1.6, color: colors[LINES[j % LINES.length]] },
          },
    ),
  )
  const axes = tops.map((top, i) => [
    `yaxis${i ? i + 1 : ''}`,
    {
      domain: [Math.max(top - ROW / inner, 0), top],
      gridcolor: colors.grid,
      zeroline: false,
      fixedrange: true,
      ...linearAxis(
        data.filter(({ yaxis }) => yaxis === `y${i ? i + 1 : ''}`).flatMap(({ y }) => y),
        undefined,
        { fromZero: 'always' },
      ),
    },
  ])
  const layout = {
    margin: MARGIN,
    height: inner + MARGIN.t + MARGIN.b,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet },
    hovermode: 'x unified',
    uirevision: 'same',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    legend: { orientation: 'h', x: 1, xanchor: 'right', y: 1, yanchor: 'bottom', font: { color: colors.text } },
    xaxis: {
      title: { text: 'seconds since the start', standoff: 6 },
      gridcolor: colors.grid,
      zeroline: false,
      anchor: `y${rows.length > 1 ? rows.length : ''}`,
    },
    annotations: rows.map(([title], i) => ({
      text: title,
      x: 0,
      xref: 'paper',
      xanchor: 'left',
      y: tops[i],
      yref: 'paper',
      yanchor: 'bottom',
      yshift: 3,
      showarrow: false,
      font: { color: colors.text, size: 12.5 },
    })),
    ...Object.fromEntries(axes),
  }
  return { data, layout, drawn: devices.reduce((sum, device) => sum + device.elapsed_ms.length, 0) }
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createSystem = (section, api) => {
  const plot = createPlot(section.querySelector('[data-system-plot]'), systemFigure)
  let isInView = false
  const refresh = inTurn(async () => {
    if (!isInView) return
    const { devices } = await (await insisted(`${api}/system`)).json()
    const length = Math.max(0, ...devices.map((device) => device.elapsed_ms.at(-1)))
    const hasLines = devices.some((device) => device.elapsed_ms.length > 1)
    still(() => {
      section.querySelector('[data-none]').hidden = hasLines
      section.querySelector('[data-system-plot]').hidden = !hasLines
    })
    if (hasLines) plot.draw(devices)
    await pause(Math.min(Math.max(REFRESH.least, REFRESH.share * length), REFRESH.most))
  })
  new IntersectionObserver(
    (entries) => {
      isInView = entries.at(-1).isIntersecting
      refresh()
    },
    { rootMargin: '100px' },
  ).observe(section)
  return { refresh }
}
