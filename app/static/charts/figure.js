// The figure: rows that share x, as Plotly wants them. Draws nothing itself.
import { ticksOf, tickText } from 'axis'
import { escaped, power, scale as scaleText } from 'formats'
import { marksOf } from 'annotations'
import { folded } from 'decimation'
import { METRIC as METRIC_AXIS, smoothed } from 'points'

const GAP = 34 // pixels between rows: the row's title stands there
const METRIC = 110 // pixels
/** Rows shrink so far, for the figure to keep the height that it has with one metric. */
const SMALLEST = 0.64
/** Below, the axis' strip has the labels; a picture has them itself. */
const MARGIN = { l: 62, r: 22, t: 30, b: 10 }
export const PICTURE_MARGIN = { ...MARGIN, b: 42 }
/** Of every axis. To hide labels that stick out Plotly measures each of them, at a sixth of a redraw. */
const AXIS = { zeroline: false, ticklabeloverflow: 'allow' }
/** Lines of ours, whose names scripts may log metrics by. */
const OURS = new Set(['loss', 'smoothed', 'scale', 'lr'])
const MARKED = 100 // points of a metric that are told apart: each mark is an element
/** Whether there is a loss scale, and whether what steps wait for data is known, or will be. @typedef {{scaled: boolean, timed: boolean}} Known */
/** @typedef {{name: string, title: string, pixels: number, isMetric?: boolean, axis: any, traces: any[]}} Row */
const X_TITLES = { step: 'attempted step', applied: 'applied updates', time: 'seconds since the start' }

/** Every row: its name in the address, title, pixels, axis and traces. @param {import('points').Points} points @param {import('url_state').View} view @param {Record<string, string>} colors @param {Known} known @param {import('decimation').Screen} screen @returns {Row[]} */
const rowsOf = (points, view, colors, { scaled, timed }, screen) => {
  const onScreen = ({ x, y }) => folded({ x: points.x(x, view.x), y }, screen)
  const [loss, scale, norm, clipped, lr] = ['loss', 'scale', 'grad_norm', 'grad_norm_clipped', 'lr']
    .map((name) => onScreen(points.lines[name]))
  const milliseconds = (name) => {
    const { x, y } = onScreen(points.lines[name])
    return { x, y: y.map((us) => (us === null ? null : us / 1000)) }
  }
  const line = (series, name, color, more = {}) => ({
    ...series, name, mode: 'lines', type: 'scatter',
    line: { color, width: 1.6, ...more.line }, hoverinfo: 'none', ...more.trace,
  })
  const measured = (name, color) => {
    const series = onScreen(points.metrics.get(name) ?? { x: [], y: [] })
    const mode = series.x.length > MARKED ? 'lines' : 'lines+markers'
    return line(series, OURS.has(name) ? `${name}, logged` : name, color, { trace: { mode, marker: { size: 6, color } } })
  }
  const names = [...points.metrics.keys()].filter((name) => !name.startsWith('run/'))
  const losses = names.filter((name) => name.endsWith('/loss'))
  const mean = points.means.loss ?? points.lines.loss
  const lossLines = view.smooth
    ? [line(loss, 'loss', colors.loss, { trace: { opacity: 0.3 }, line: { width: 1 } }),
      line(onScreen({ x: mean.x, y: smoothed(mean.y, view.smooth) }), 'smoothed', colors.loss, { line: { width: 2.2 } })]
    : [line(loss, 'loss', colors.loss)]
  return [
    { name: 'loss', title: ['Loss', ...losses].join(' · '), pixels: 250, axis: lossAxis(view, loss.y),
      traces: [...lossLines, ...losses.map((name) => measured(name, colors.val))] },
    ...(scaled ? [{ name: 'scale', title: 'Loss scale', pixels: 200, axis: scaleAxis(scale.y),
      traces: [line(scale, 'scale', colors.scale, { line: { shape: 'hv', width: 2 } })] }] : []),
    { name: 'norm', title: `Gradient norm, unscaled${screen.pixels < 400 ? '' : ': before (faint) and after the clip'}`, pixels: 150, axis: logAxis([...norm.y, ...clipped.y]),
      traces: [line(norm, 'norm before clip', colors.norm, { trace: { opacity: 0.4 }, line: { width: 1 } }),
        line(clipped, 'norm after clip', colors.norm)] },
    ...arranged(names.filter((name) => !losses.includes(name)), view).map((name) =>
      ({ name, title: name, pixels: METRIC, isMetric: true, axis: { nticks: 4 }, traces: [measured(name, colors.val)] })),
    { name: 'lr', title: 'Learning rate', pixels: 80, axis: { nticks: 3, rangemode: 'tozero', exponentformat: 'power' },
      traces: [line(lr, 'lr', colors.lr)] },
    ...(points.hasWaits || (timed && !points.total) ? [{ name: 'data', title: `Step, ms${screen.pixels < 400 ? '' : ' (faint): of it waiting for data'}`, pixels: 90, axis: { nticks: 4, rangemode: 'tozero' },
      traces: [line(milliseconds('step_us'), 'step, ms', colors.data, { trace: { opacity: 0.4 }, line: { width: 1 } }),
        line(milliseconds('data_us'), 'waiting for data, ms', colors.data)] }] : []),
  ]
}

/** What a metric is grouped by. @param {string} name */
export const prefixOf = (name) => (name.includes('/') ? name.slice(0, name.indexOf('/') + 1) : '')

/** Metrics as people have them: pinned ones first, then by prefix, without those that are folded away. @param {string[]} names @param {import('url_state').View} view */
const arranged = (names, { pinned, collapsed }) => {
  const rest = names.filter((name) => !pinned.includes(name) && !collapsed.includes(prefixOf(name)))
  return [...pinned.filter((name) => names.includes(name)), ...rest.sort((a, b) => (prefixOf(a) < prefixOf(b) ? -1 : prefixOf(a) > prefixOf(b) ? 1 : 0))]
}

/** From zero on, unless all there is lies in the upper half, where it would look flat. @param {import('url_state').View} view @param {(number|null)[]} values */
export const lossAxis = (view, values) => {
  if (view.loss === 'log') return logAxis(values)
  let [low, high] = [Infinity, -Infinity]
  for (const value of values) {
    if (value === null) continue
    low = Math.min(low, value)
    high = Math.max(high, value)
  }
  return { rangemode: low > high / 2 ? 'normal' : 'tozero' }
}

/** Few decades show 1, 2 and 5 of each; many show every so manieth. @param {(number|null)[]} values */
const logAxis = (values) => {
  const [low, high] = positiveExtent(values).map(Math.log10)
  const decades = high - low
  return { type: 'log', dtick: decades < 2.5 ? 'D2' : Math.ceil(decades / 4), tickformat: '~g' }
}

/** @param {(number|null)[]} values @returns {[number, number]} */
const positiveExtent = (values) => {
  let [low, high] = [Infinity, -Infinity]
  for (const value of values) {
    if (value === null || value <= 0) continue
    low = Math.min(low, value)
    high = Math.max(high, value)
  }
  return [low, high]
}

/** Powers of two, with room for one more on either side. @param {(number|null)[]} values */
export const scaleAxis = (values) => {
  const [lowest, highest] = positiveExtent(values).map(Math.log2)
  const [low, high] = [Math.floor(lowest) - 1, Math.ceil(highest) + 1]
  if (!Number.isFinite(low)) return { type: 'log' }
  const every = Math.max(1, Math.ceil((high - low) / 7))
  const ticks = Array.from({ length: 400 }, (_, i) => i - 200).filter((e) => e % every === 0 && e > -126 && e < 128)
  return {
    type: 'log', range: [Math.log10(2 ** low), Math.log10(2 ** high)], tickmode: 'array',
    tickvals: ticks.map((e) => 2 ** e), ticktext: ticks.map(power),
  }
}

/** Give rows their share of a height that metrics coming in do not change, and return it. @param {{pixels: number, isMetric?: boolean}[]} rows */
const fit = (rows) => {
  const sumOf = (some) => some.reduce((sum, { pixels }) => sum + pixels, 0)
  const others = rows.filter(({ isMetric }) => !isMetric)
  const kept = sumOf(others) + METRIC + GAP * others.length
  const [sum, gaps] = [sumOf(rows), GAP * (rows.length - 1)]
  const share = Math.max((kept - gaps) / sum, SMALLEST)
  for (const row of rows) row.pixels *= share
  return Math.round(sum * share + gaps)
}

/** Whether there is something to see in a row: axes of nothing would show numbers of nothing. @param {{traces: any[]}} row */
const isEmpty = ({ traces }) => traces.every(({ y }) => y.every((value) => value === null))

/** A row's share of the figure. @param {number} low @param {number} high @param {number} inner all in pixels @returns {[number, number]} */
const placed = (low, high, inner) => [low / inner, high / inner]

/**
 * @param {import('points').Points} points @param {import('url_state').View} view
 * @param {Record<string, string>} colors @param {Known} known @param {number} width pixels of the plot
 */
export const figure = (points, view, colors, known, width) => {
  const pixels = Math.max(width - MARGIN.l - MARGIN.r, 100)
  const [first, end] = points.x([points.first, points.end], view.x)
  /** @type {import('decimation').Screen} */
  const screen = { range: view.range ?? [first, end], pixels }
  const all = rowsOf(points, view, colors, known, screen)
  const lines = all.flatMap((row) => row.traces.map(({ name, line, x, y }) =>
    ({ name, color: line.color, x, y, row: row.name, ...(row.name === 'scale' && { words: scaleText }) })))
  const { alone } = view
  const asked = alone ? all.filter(({ name }) => name === alone.row).map((row) => ({ ...row, pixels: alone.pixels })) : all
  const seen = asked.map((row) => ({ ...row, traces: row.traces.filter(({ name }) => !view.hidden.includes(name)) })).filter(({ traces }) => traces.length)
  const made = seen.length ? seen : [{ ...all[0], pixels: alone?.pixels ?? all[0].pixels, traces: [] }]
  const ticks = ticksOf(screen.range, pixels, view.x in X_TITLES && view.x !== 'time')
  const inner = alone ? alone.pixels : fit(made)
  let top = inner
  const rows = made.map((row) => {
    const high = top
    top -= row.pixels + GAP
    return { ...row, domain: placed(high - row.pixels, high, inner) }
  })
  // Axis y spans the figure, behind the rows: ticks in all of them are one trace there.
  const layout = {
    height: inner + MARGIN.t + MARGIN.b, margin: MARGIN,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet },
    showlegend: false, hovermode: 'x', dragmode: 'zoom',
    yaxis: { domain: [0, 1], range: [0, 1], fixedrange: true, visible: false },
    xaxis: {
      ...(rows.every(isEmpty) && { visible: false }), anchor: `y${rows.length + 1}`, gridcolor: colors.grid, ...AXIS,
      showticklabels: false, ...(ticks.length && { tickmode: 'array', tickvals: ticks, ticktext: ticks.map(tickText) }),
      showspikes: true, spikemode: 'across', spikesnap: 'cursor', spikethickness: -2, spikedash: 'solid', spikecolor: colors.edge,
      ...(screen.range[0] < screen.range[1] && { range: screen.range, autorange: false }),
    },
    annotations: rows.map((row) => ({
      text: escaped(row.title), x: 0, xref: 'paper', xanchor: 'left', y: row.domain[1], yref: 'paper', yanchor: 'bottom',
      yshift: 3, showarrow: false, font: { color: colors.text, size: 12.5 },
    })),
    shapes: /** @type {object[]} */ (rows.some((row) => row.name === 'scale' && !isEmpty(row)) ? [{ type: 'rect', layer: 'below', xref: 'paper', x0: 0, x1: 1, yref: `y${rows.findIndex(({ name }) => name === 'scale') + 2}`, y0: 1e-38, y1: 1,
      fillcolor: colors.skip, opacity: 0.13, line: { width: 0 } }] : []),
  }
  const data = []
  rows.forEach((row, i) => {
    layout[`yaxis${i + 2}`] = {
      domain: row.domain, gridcolor: colors.grid, ...AXIS, automargin: false, ...row.axis, ...(isEmpty(row) && { visible: false }),
      ...(view.rows[row.name] && { range: view.rows[row.name], autorange: false }),
    }
    for (const trace of row.traces) data.push({ ...trace, yaxis: `y${i + 2}` })
  })
  const marks = marksOf(points, view, rows, inner, colors, screen)
  layout.shapes.push(...marks.shapes)
  data.push(...marks.traces)
  const axis = { title: X_TITLES[view.x] ?? view.x.slice(METRIC_AXIS.length), ticks, range: screen.range, left: MARGIN.l, pixels }
  const titles = Object.fromEntries(rows.map(({ name, title }) => [name, title]))
  return { data, layout, rows: rows.map(({ name }) => name), titles, metrics: rows.filter(({ isMetric }) => isMetric).map(({ name }) => name), lines, marks: marks.traces.filter(({ text, name }) => text && name !== 'skips counted'), axis }
}
