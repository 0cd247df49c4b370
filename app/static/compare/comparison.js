// A series of several runs in one figure, in Plotly's format. Draws nothing itself.
import { NONFINITE_SIGNS, nonfiniteMarks } from 'annotations'
import { chosenRange, linearAxis, logAxis, ticksOf, tickText } from 'axis'
import { banded, meanOf } from 'error_band'
import { lossAxis, scaleAxis } from 'figure'
import { escaped, scale as scaleText } from 'formats'
import { folded, merged } from 'decimation'
import { METRIC } from 'points'
import { isSmoothed, smoothedSeries } from 'smoothing'

export const MARGIN = { l: 56, r: 14, t: 6, b: 26 }
const DASHES = ['solid', 'dash', 'dot', 'dashdot', 'longdash']
const MARKED = 100 // points of a metric drawn as marks
/** Pixels a line may have points for: fifty lines side by side, each as fine as one, would take seconds to draw. */
const PIXELS = 24_000
/** Panels in which each skipped step has a tick; how high a row of ticks is, and all of them at most. */
const [WITH_SKIPS, TICK, MOST_TICKS] = [['loss', 'scale'], 8, 0.3]
const X_TITLES = {
  step: 'attempted step',
  applied: 'applied updates',
  time: 'seconds since the start',
  examples: 'examples',
}
/** @param {import('points').Axis} mode */
export const titleOf = (mode) => X_TITLES[mode] ?? mode.slice(METRIC.length)
const SCALED = { step_us: 1 / 1000, data_us: 1 / 1000 }

/**
 * place: among all runs, which its colour and its dashes go by; group: what it has in common with others of one mean.
 * @typedef {{
 *   id: string,
 *   label: string,
 *   place: number,
 *   groupPlace?: number,
 *   points: import('points').Points,
 *   group: string|null
 * }} Drawn
 * @typedef {{name: string, title: string}} Row a series of steps, or a metric
 * @typedef {{
 *   trace: any,
 *   run: Drawn|null,
 *   label: string,
 *   steps: number[],
 *   at: number[],
 *   nonfinite?: import('points').Nonfinite & {x: number[]}
 * }} Entry a trace, and its texts at the pointer
 */

/** Colour and dashes of the n-th run. @param {number} place @param {Record<string, string>} colors */
export const strokeOf = (place, colors) => ({
  color: colors[`run${place % 10}`],
  dash: DASHES[Math.floor(place / 10) % DASHES.length],
})

/** The place whose colour a run has: of its group, if runs are grouped. @param {Drawn} run */
const placeOf = ({ group, place, groupPlace }) => (group === null ? place : (groupPlace ?? place))

/**
 * A series of a run: of its steps, or else a metric; means: of its buckets, if it has any.
 * @param {import('points').Points} points
 * @param {string} name
 */
const seriesOf = (points, name) => {
  if (name === 'examples_per_second') {
    const { examples, lines, means } = points
    if (!examples) return null
    const flip = (line) => line && { x: line.x, y: line.y.map((us) => (us ? (examples.each / us) * 1e6 : null)) }
    return lines.step_us ? { line: flip(lines.step_us), mean: flip(means.step_us), isMetric: false } : null
  }
  const own = points.lines[name]
  const line = own?.nonfinite?.steps.length || own?.y.some((y) => y !== null) ? own : points.metrics.get(name)
  if (!line) return null
  const mean = line === own ? points.means[name] : undefined
  const factor = SCALED[name]
  const scaled = (each) =>
    each && (factor ? { x: each.x, y: each.y.map((y) => (y === null ? null : y * factor)) } : each)
  return { line: scaled(line), mean: scaled(mean), isMetric: line !== own }
}

/**
 * @param {{runs: Drawn[], row: Row, view: import('url_state').View, band: 'range'|'deviation'}} wanted
 * @param {Record<string, string>} colors @param {{width: number, height: number}} size pixels of the plot
 */
export const runsFigure = ({ runs, row, view, band }, colors, { width, height }) => {
  const pixels = Math.max(width - MARGIN.l - MARGIN.r, 100)
  const inner = Math.max(height - MARGIN.t - MARGIN.b, 20)
  const skipping = WITH_SKIPS.includes(row.name)
    ? runs.filter(({ points }) => points.skips.steps.length && points.x([1], view.x).length)
    : []
  const foot = skipping.length ? Math.min(TICK * skipping.length, MOST_TICKS * inner) + 8 : 0
  const range = view.range ?? extent(runs, view.x, row.name)
  const screen = { range, pixels: Math.min(pixels, PIXELS / Math.max(runs.length, 1)) }
  const lines = runs.flatMap((run) => {
    const series = seriesOf(run.points, row.name)
    return series && run.points.x([1], view.x).length
      ? [{ run, ...series, nonfinite: run.points.nonfiniteAt(series.line.nonfinite, view.x) }]
      : []
  })
  // The mean of several scalers' scales is one that none of them had.
  const traces =
    row.name !== 'scale' && lines.some(({ run }) => run.group !== null)
      ? means(lines, row, view, band, colors)
      : lines.flatMap((each) => lineOf(each, row, view, screen, colors, lines.length))
  /** @type {Entry[]} */
  const entries = [
    ...traces.map((each) => ({
      ...each,
      trace: { ...each.trace, yaxis: 'y2', showlegend: each.trace.hoverinfo !== 'skip' },
    })),
    ...skipping.map((run, i) => skipsOf(run, i, skipping.length, view, screen, colors)),
  ]
  const marks = nonfiniteMarks(
    lines.map(({ run, nonfinite }) => ({ label: run.label, color: strokeOf(placeOf(run), colors).color, nonfinite })),
    { range, pixels },
    inner,
    foot,
  )
  const values = traces.flatMap(({ trace }) => trace.y)
  /** @type {any[]|null} */
  let known = null
  /** Return the recorded lines of each run: neither smoothed nor averaged. */
  const recorded = () =>
    (known ??= lines.map(({ run, line, nonfinite }) => ({
      run,
      name: run.label,
      color: '',
      x: run.points.x(line.x, view.x),
      y: line.y,
      nonfinite,
      ...(row.name === 'scale' && { words: scaleText }),
    })))
  const { zoom, outliers } = chosenRange(row.name, view, recorded, range, isLog(row.name, view))
  const ticks = ticksOf(range, pixels, view.x in X_TITLES && view.x !== 'time')
  // Axis y is the foot, with a row of ticks for each run that skipped.
  const layout = {
    height,
    margin: MARGIN,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
    hovermode: 'closest',
    hoverdistance: 40,
    showlegend: false,
    dragmode: 'zoom',
    xaxis: {
      type: 'linear',
      gridcolor: colors.grid,
      showgrid: false,
      zeroline: false,
      anchor: 'y',
      ...(!lines.length && { visible: false }),
      ...(range[0] < range[1] && { range, autorange: false }),
      ...(ticks.length && { tickmode: 'array', tickvals: ticks, ticktext: ticks.map(tickText) }),
    },
    yaxis: {
      type: 'linear',
      domain: [0, foot ? (foot - 8) / inner : 0.001],
      range: [0, Math.max(skipping.length, 1)],
      visible: false,
      fixedrange: true,
    },
    yaxis2: {
      domain: [foot / inner, 1],
      type: 'linear',
      gridcolor: colors.grid,
      zeroline: false,
      ...axisOf(row, view, values, zoom),
      ...(zoom && { range: zoom, autorange: false }),
    },
    shapes: marks.shapes,
  }
  const own = entries.filter(({ steps, trace }) => steps.length && trace.hoverinfo !== 'skip')
  return {
    data: entries.map(({ trace }) => trace),
    layout,
    entries,
    recorded,
    strokes: lines.map(({ run }) => strokeOf(placeOf(run), colors)),
    isFitted: true,
    drawn: lines.reduce((sum, { line }) => sum + line.x.length, 0),
    // What a crosshair needs.
    lines: own.map(({ label, trace, nonfinite }) => ({
      name: label,
      color: '',
      x: trace.x,
      y: trace.y,
      nonfinite,
      ...(row.name === 'scale' && { words: scaleText }),
    })),
    marks: marks.traces,
    signs: [...marks.traces.map(({ name }) => NONFINITE_SIGNS[name].join(' ')), ...(outliers ? [outliers] : [])].join(
      ' · ',
    ),
    axis: { title: titleOf(view.x), range, left: MARGIN.l, pixels },
  }
}

/**
 * Return the common extent of all runs in the panel of a series.
 * @param {Drawn[]} runs
 * @param {import('points').Axis} mode
 * @param {string} name
 * @returns {[number, number]}
 */
const extent = (runs, mode, name) => {
  const ends = runs.flatMap(({ points }) =>
    mode.startsWith(METRIC)
      ? points.known(mode.slice(METRIC.length)).y
      : points.x(
          [points.begin, points.endOf([name])].filter((step) => step || step === points.begin),
          mode,
        ),
  )
  return ends.length ? [ends.reduce((a, b) => Math.min(a, b)), ends.reduce((a, b) => Math.max(a, b))] : [0, 1]
}

/** Series whose axis is logarithmic, whatever is chosen. */
export const ALWAYS_LOG = ['scale', 'grad_norm', 'grad_norm_clipped']

const isLog = (name, view) => ALWAYS_LOG.includes(name) || view.logs.includes(name)
const axisOf = ({ name }, view, values, zoom) => {
  if (name === 'scale') return scaleAxis(values)
  if (isLog(name, view)) return logAxis(values, zoom)
  return name === 'loss' ? lossAxis(values, zoom) : linearAxis(values, zoom, { labels: 6 })
}

/** A run's line; smoothed, with the raw one faint behind it. @returns {Entry[]} */
const lineOf = ({ run, line, mean, isMetric, nonfinite }, row, view, screen, colors, others) => {
  const stroke = { ...strokeOf(placeOf(run), colors), ...(row.name === 'scale' && { shape: 'hv' }) }
  const width = others > 12 ? 1.2 : others > 4 ? 1.6 : 2
  const traceOf = ({ x: steps, y }, part, more) => {
    const at = run.points.x(steps, view.x)
    const mode = isMetric && steps.length <= MARKED ? 'lines+markers' : 'lines'
    const trace = {
      ...folded({ x: at, y }, screen),
      uid: `run${run.id}-${part}`,
      name: escaped(run.label),
      type: 'scatter',
      mode,
      hoverinfo: 'none',
      marker: { size: 5, color: stroke.color },
      line: { ...stroke, width },
      ...more,
    }
    return { trace, run, label: run.label, steps, at, nonfinite }
  }
  if (!isSmoothed(row.name, view)) return [traceOf(line, 'line', {})]
  return [
    traceOf(line, 'raw', {
      opacity: 0.22,
      mode: 'lines',
      hoverinfo: 'skip',
      line: { ...stroke, dash: 'solid', width: 1 },
    }),
    traceOf(smoothedSeries(row.name, mean ?? line, view), 'line', { line: { ...stroke, width: width + 0.4 } }),
  ]
}

/** The mean of each group and its band. @returns {Entry[]} */
const means = (lines, row, view, band, colors) => {
  const groups = Map.groupBy(lines, ({ run }) => run.group)
  return [...groups].flatMap(([group, members]) => {
    const { color } = strokeOf(members[0].run.groupPlace, colors)
    const { x, mean, low, high } = banded(
      members.map(({ run, line, mean: buckets }) => {
        const { x: steps, y } = smoothedSeries(row.name, buckets ?? line, view)
        return { x: run.points.x(steps, view.x), y }
      }),
      band,
    )
    const edge = { x, type: 'scatter', mode: 'lines', hoverinfo: 'skip', line: { width: 0, color } }
    const said = { run: null, label: `${meanOf(members.length)} with ${group}`, steps: x, at: x }
    return [
      { ...said, trace: { ...edge, y: low } },
      {
        ...said,
        trace: { ...edge, y: high, fill: 'tonexty', fillcolor: color.replace('rgb(', 'rgba(').replace(')', ', 0.16)') },
      },
      {
        ...said,
        trace: {
          x,
          y: mean,
          name: escaped(group),
          type: 'scatter',
          mode: 'lines',
          hoverinfo: 'none',
          line: { color, width: 2.2 },
        },
      },
    ]
  })
}

/** A tick at each skipped step, a row of its own for each run. @returns {Entry} */
const skipsOf = (run, i, rows, view, screen, colors) => {
  const { skips } = run.points
  const ticks = merged(skips, run.points.x(skips.steps, view.x), screen)
  const trace = {
    x: ticks.flatMap(({ x }) => [x, x, null]),
    y: ticks.flatMap(() => [rows - 0.9 - i, rows - 0.2 - i, null]),
    uid: `run${run.id}-skips`,
    yaxis: 'y',
    type: 'scatter',
    mode: 'lines',
    hoverinfo: 'skip',
    showlegend: false,
    line: { color: strokeOf(run.place, colors).color, width: 1.5 },
  }
  return { trace, run, label: run.label, steps: [], at: [] }
}
