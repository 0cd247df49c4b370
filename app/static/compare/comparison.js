// Series of several runs in one figure, as Plotly wants it: a row a series, all by the same x.
// Draws nothing itself.
import { banded } from 'error_band'
import { lossAxis, scaleAxis } from 'figure'
import { escaped } from 'formats'
import { folded, merged } from 'decimation'
import { METRIC, position, smoothed } from 'points'

const MARGIN = { l: 62, r: 14, t: 26, b: 42 }
const GAP = 34 // pixels between rows: the row's title stands there
const [ALONE, SEVERAL] = [330, 210] // pixels of a row
const DASHES = ['solid', 'dash', 'dot', 'dashdot', 'longdash']
const MARKED = 100 // points of a metric that are told apart
/** Pixels a line may have points for: fifty lines side by side, each as fine as one, would take seconds to draw. */
const PIXELS = 24_000
const X_TITLES = { step: 'attempted step', applied: 'applied updates', time: 'seconds since the start', examples: 'examples' }
/** @param {import('points').Axis} mode */
export const titleOf = (mode) => X_TITLES[mode] ?? mode.slice(METRIC.length)
const SCALED = { step_us: 1 / 1000, data_us: 1 / 1000 }

/**
 * place: among all runs, which its colour and its dashes go by; group: what it has in common with others of one mean.
 * @typedef {{id: string, label: string, place: number, points: import('points').Points, group: string|null}} Drawn
 * @typedef {{name: string, title: string}} Row a series of steps, or a metric
 * @typedef {{trace: any, run: Drawn|null, label: string, steps: number[], at: number[]}} Told a trace, and its texts at the pointer
 */

/** Colour and dashes of the n-th run. @param {number} place @param {Record<string, string>} colors */
export const strokeOf = (place, colors) => ({ color: colors[`run${place % 10}`], dash: DASHES[Math.floor(place / 10) % DASHES.length] })

/** A series of a run: of its steps, or else a metric; means: of its buckets, if it has any. @param {import('points').Points} points @param {string} name */
const seriesOf = (points, name) => {
  if (name === 'examples_per_second') {
    const { examples, lines, means } = points
    if (!examples) return null
    const flip = (line) => line && { x: line.x, y: line.y.map((us) => (us ? examples.each / us * 1e6 : null)) }
    return lines.step_us ? { line: flip(lines.step_us), mean: flip(means.step_us), isMetric: false } : null
  }
  const own = points.lines[name]
  const line = own?.y.some((y) => y !== null) ? own : points.metrics.get(name)
  if (!line) return null
  const mean = line === own ? points.means[name] : undefined
  const factor = SCALED[name]
  const scaled = (each) => each && (factor ? { x: each.x, y: each.y.map((y) => (y === null ? null : y * factor)) } : each)
  return { line: scaled(line), mean: scaled(mean), isMetric: line !== own }
}

/**
 * @param {{runs: Drawn[], rows: Row[], view: import('url_state').View, band: 'range'|'deviation'}} wanted
 * @param {Record<string, string>} colors @param {number} width pixels of the plot
 * @returns {{data: any[], layout: any, drawn: number, told: Told[], rows: string[]}}
 */
export const comparisonFigure = ({ runs, rows, view, band }, colors, width) => {
  const pixels = Math.max(width - MARGIN.l - MARGIN.r, 100)
  const skipping = runs.filter(({ points }) => points.skips.steps.length && points.x([1], view.x).length)
  const tall = skipping.length > 12 ? 4 : 8 // pixels of a row of ticks
  const height = rows.length === 1 ? ALONE : SEVERAL
  const foot = skipping.length ? tall * skipping.length + 8 : 0
  const inner = rows.length * height + (rows.length - 1) * GAP + foot
  const screen = { range: view.range ?? extent(runs, view.x), pixels: Math.min(pixels, PIXELS / Math.max(runs.length, 1)) }
  const title = (text) => ({ text, standoff: 6 })
  const layout = {
    margin: MARGIN, height: inner + MARGIN.t + MARGIN.b, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, hovermode: 'closest', hoverdistance: 40,
    showlegend: false, dragmode: 'zoom', annotations: /** @type {object[]} */ ([]),
    xaxis: {
      title: title(escaped(titleOf(view.x))), gridcolor: colors.grid, zeroline: false, anchor: 'y',
      showspikes: true, spikemode: 'across', spikesnap: 'cursor', spikethickness: -2, spikedash: 'solid', spikecolor: colors.edge,
      ...(screen.range[0] < screen.range[1] && { range: screen.range, autorange: false }),
    },
    yaxis: { domain: [0, foot ? (foot - 8) / inner : 0.001], range: [0, Math.max(skipping.length, 1)], visible: false, fixedrange: true },
  }
  /** @type {Told[]} */
  const told = []
  let drawn = 0
  rows.forEach((row, i) => {
    const top = inner - i * (height + GAP)
    const axis = `y${i + 2}`
    const lines = runs.flatMap((run) => {
      const series = seriesOf(run.points, row.name)
      if (!series || !run.points.x([1], view.x).length) return []
      return [{ run, ...series }]
    })
    const seen = row.name === 'loss' || row.name === 'scale' ? lines.flatMap(({ line }) => line.y) : []
    drawn += lines.reduce((sum, { line }) => sum + line.x.length, 0)
    layout[`yaxis${i + 2}`] = {
      domain: [(top - height) / inner, top / inner], gridcolor: colors.grid, zeroline: false, ...axisOf(row, view, seen),
      ...(view.rows[row.name] && { range: view.rows[row.name], autorange: false }),
    }
    layout.annotations.push({ text: escaped(row.title), x: 0, xref: 'paper', xanchor: 'left', y: top / inner, yref: 'paper', yanchor: 'bottom', yshift: 3, showarrow: false, font: { color: colors.text, size: 12.5 } })
    const traces = lines.some(({ run }) => run.group !== null)
      ? means(lines, row, view, band, colors)
      : lines.flatMap((each) => lineOf(each, row, view, screen, colors, lines.length))
    // A legend is drawn in pictures alone, where a run's name stands once.
    const isTold = ({ trace }) => i === 0 && trace.hoverinfo !== 'skip'
    told.push(...traces.map((each) => ({ ...each, trace: { ...each.trace, yaxis: axis, showlegend: isTold(each) } })))
  })
  skipping.forEach((run, i) => told.push(skipsOf(run, i, skipping.length, view, screen, colors)))
  return { data: told.map(({ trace }) => trace), layout, drawn, told, rows: rows.map(({ name }) => name) }
}

/** From where to where all runs go. @param {Drawn[]} runs @param {import('points').Axis} mode @returns {[number, number]} */
const extent = (runs, mode) => {
  const ends = runs.flatMap(({ points }) => (mode.startsWith(METRIC)
    ? points.known(mode.slice(METRIC.length)).y
    : points.x([points.begin, points.end].filter((step) => step || step === points.begin), mode)))
  return ends.length ? [ends.reduce((a, b) => Math.min(a, b)), ends.reduce((a, b) => Math.max(a, b))] : [0, 1]
}

const axisOf = ({ name }, view, values) => {
  if (name === 'loss') return lossAxis(view, values)
  if (name === 'scale') return scaleAxis(values)
  return name.startsWith('grad_norm') ? { type: 'log', nticks: 5, tickformat: '~g' } : { nticks: 6 }
}

/** A run's line; smoothed, with the raw one faint behind it. @returns {Told[]} */
const lineOf = ({ run, line, mean, isMetric }, row, view, screen, colors, others) => {
  const stroke = { ...strokeOf(run.place, colors), ...(row.name === 'scale' && { shape: 'hv' }) }
  const width = others > 12 ? 1.2 : others > 4 ? 1.6 : 2
  const traceOf = ({ x: steps, y }, more) => {
    const at = run.points.x(steps, view.x)
    const mode = isMetric && steps.length <= MARKED ? 'lines+markers' : 'lines'
    const trace = { ...folded({ x: at, y }, screen), name: escaped(run.label), type: 'scatter', mode, hoverinfo: 'none', marker: { size: 5, color: stroke.color }, line: { ...stroke, width }, ...more }
    return { trace, run, label: run.label, steps, at }
  }
  if (!view.smooth || (isMetric && line.x.length <= MARKED)) return [traceOf(line, {})]
  const smooth = mean ?? line
  return [
    traceOf(line, { opacity: 0.25, mode: 'lines', hoverinfo: 'skip', line: { ...stroke, dash: 'solid', width: 1 } }),
    traceOf({ x: smooth.x, y: smoothed(smooth.y, view.smooth) }, { line: { ...stroke, width: width + 0.4 } }),
  ]
}

/** The mean of each group and its band. @returns {Told[]} */
const means = (lines, row, view, band, colors) => {
  const groups = Map.groupBy(lines, ({ run }) => run.group)
  return [...groups].flatMap(([group, members]) => {
    const { color } = strokeOf(members[0].run.groupPlace, colors)
    const { x, mean, low, high } = banded(members.map(({ run, line, mean: buckets }) => {
      const { x: steps, y } = buckets ?? line
      return { x: run.points.x(steps, view.x), y: view.smooth ? smoothed(y, view.smooth) : y }
    }), band)
    const edge = { x, type: 'scatter', mode: 'lines', hoverinfo: 'skip', line: { width: 0, color } }
    const said = { run: null, label: `mean of ${members.length} with ${group}`, steps: x, at: x }
    return [
      { ...said, trace: { ...edge, y: low } },
      { ...said, trace: { ...edge, y: high, fill: 'tonexty', fillcolor: color.replace('rgb(', 'rgba(').replace(')', ', 0.16)') } },
      { ...said, trace: { x, y: mean, name: escaped(group), type: 'scatter', mode: 'lines', hoverinfo: 'none', line: { color, width: 2.2 } } },
    ]
  })
}

/** A tick at each skipped step, a row of its own for each run. @returns {Told} */
const skipsOf = (run, i, rows, view, screen, colors) => {
  const { skips } = run.points
  const ticks = merged(skips, run.points.x(skips.steps, view.x), screen)
  const trace = {
    x: ticks.flatMap(({ x }) => [x, x, null]), y: ticks.flatMap(() => [rows - 0.9 - i, rows - 0.2 - i, null]),
    yaxis: 'y', type: 'scatter', mode: 'lines', hoverinfo: 'skip', showlegend: false, line: { color: strokeOf(run.place, colors).color, width: 1.5 },
  }
  return { trace, run, label: run.label, steps: [], at: [] }
}

/** The step of the point at the pointer. @param {Told} told @param {number} x */
export const stepAt = ({ steps, at }, x) => steps[Math.min(position(at, x), steps.length - 1)]
