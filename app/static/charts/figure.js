// Figures of a run's panels in Plotly's format, one per panel. Draws nothing itself.
import { chosenRange, linearAxis, logAxis, positiveExtent, ticksOf, tickText } from 'axis'
import { escaped, power, scale as scaleText } from 'formats'
import { marksOf } from 'annotations'
import { folded } from 'decimation'
import { METRIC as METRIC_AXIS } from 'points'
import { isSmoothed, smoothedSeries } from 'smoothing'

/** Pixels around a panel's plot. */
export const MARGIN = { l: 56, r: 26, t: 8, b: 24 }
/**
 * Layout of every axis. Without these options Plotly measures each label to hide those that stick out, and reads all
 * values to find a type.
 */
const AXIS = { type: 'linear', zeroline: false, ticklabeloverflow: 'allow' }
/** Names of our rows and lines, which scripts may log metrics by. */
const SAME = 1e-5 // share by which a number differs that went through fp32
const OURS = new Set(['loss', 'scale', 'norm', 'data', 'examples', 'lr'])
/** Lines that scripts log again: a metric of the name and the same values has no panel of its own. */
const COPIED = new Set(['loss', 'scale'])
/** @param {string} name of a metric */
const labelOf = (name) => (OURS.has(name) ? `${name}, logged` : name)
const MARKED = 100 // points of a metric drawn as marks: each mark is an element
const LOSSES = 8 // metrics that are drawn with the loss
const SMOOTHED = 'smoothed' // of a trace that is not as recorded
const FEW = 1 // points of a line that has no length
/** Rows that have ticks of skipped steps. */
const TICKED = new Set(['loss', 'scale', 'norm'])
/**
 * onlyMetrics: no steps are expected, so that panels of steps come with the first one. Whether there is a loss scale,
 * and examples a step, 0: unknown. proven: not merely possible, before the first step.
 * @typedef {{scaled: boolean, proven?: boolean, examples: number, onlyMetrics?: boolean}} Known
 */
/**
 * group: of panels; empty: above the groups. head: title within the group. metric: that it shows. has: whether there is
 * something to draw. isLog: whatever is chosen. lines: of a screen, in the theme's colours. axis: the linear one, or
 * that of a scale.
 * @typedef {{
 *   name: string,
 *   title: string,
 *   group: string,
 *   head?: string,
 *   metric?: string,
 *   has: boolean,
 *   isLog?: boolean,
 *   lines: (screen: import('decimation').Screen, colors: Record<string, string>) => any[],
 *   axis?: (values: (number|null)[], zoom?: import('url_state').Range) => any
 * }} Row
 */
const X_TITLES = { step: 'attempted step', applied: 'applied updates', time: 'seconds since the start' }
export const GROUPS = { gradients: 'Gradients', throughput: 'Throughput', optimizer: 'Optimizer', pinned: 'Pinned' }

/** @param {{y: (number|null)[]}} line */
const isEmptyLine = ({ y }) => y.every((value) => value === null)
/** @param {any[]} traces @returns {(number|null)[]} */
const valuesOf = (traces) => traces.flatMap(({ y }) => y)

/**
 * Every panel, in order.
 * @param {import('points').Points} points
 * @param {import('url_state').View} view
 * @param {Known} known
 * @returns {Row[]}
 */
export const rowsOf = (points, view, { scaled, proven = true, examples, onlyMetrics = false }) => {
  /** @param {import('decimation').Screen} screen @param {import('points').Line} series */
  const on = (screen, { x, y, nonfinite }) => ({
    ...folded({ x: points.x(x, view.x), y }, screen),
    nonfinite: points.nonfiniteAt(nonfinite, view.x),
  })
  const line = (series, name, color, more = {}) => ({
    ...series,
    name,
    type: 'scatter',
    mode: series.x.length > FEW ? 'lines' : 'lines+markers',
    line: { color, width: 1.6, ...more.line },
    marker: { size: 6, color },
    cliponaxis: false, // the last step's marker is whole
    hoverinfo: 'skip',
    ...more.trace,
  })
  /** A series; smoothed, with the recorded one faint behind it. mean: of its buckets, if it has any. */
  const curve = (screen, name, { line: series, mean }, label, color, more = {}) => {
    if (!isSmoothed(name, view)) return [line(on(screen, series), label, color, more)]
    return [
      line(on(screen, series), label, color, { trace: { opacity: 0.3 }, line: { width: 1 } }),
      line(on(screen, smoothedSeries(name, mean ?? series, view)), `${label}, smoothed`, color, {
        line: { width: 2.2 },
        trace: { ...more.trace, mode: 'lines', meta: SMOOTHED },
      }),
    ]
  }
  const ours = (screen, name, label, color, more) =>
    curve(screen, name, { line: points.lines[name], mean: points.means[name] }, label, color, more)
  const converted = (screen, name, of, label, color, more) => {
    const by = (series) => series && { x: series.x, y: series.y.map((us) => (us === null ? null : of(us))) }
    return curve(screen, name, { line: by(points.lines[name]), mean: by(points.means[name]) }, label, color, more)
  }
  const milliseconds = (screen, name, label, color, more) =>
    converted(screen, name, (us) => us / 1000, label, color, more)
  const measured = (screen, name, color) => {
    const series = points.metrics.get(name) ?? { x: [], y: [] }
    const mode = on(screen, series).x.length > MARKED ? 'lines' : 'lines+markers'
    return curve(screen, name, { line: series, mean: undefined }, labelOf(name), color, { trace: { mode } })
  }
  /** @param {string[]} lines */
  const has = (...lines) =>
    lines.some(
      (name) => points.lines[name].nonfinite?.steps.length || points.lines[name].y.some((value) => value !== null),
    )
  const names = [...points.names].filter((name) => !name.startsWith('run/'))
  const losses = lossesOf(names)
    .map((name, i) => ({ name, color: i ? `run${i}` : 'val' }))
    .filter(({ name }) => !isCopy(points.metrics.get(name), points.lines.loss))
  const isScaled = proven || points.lines.scale.y.some((value) => value !== null && value !== 1)
  const lossLines = (screen, colors) => (onlyMetrics && !has('loss') ? [] : ours(screen, 'loss', 'loss', colors.loss))
  const normLines = (screen, colors) => {
    const { grad_norm: before, grad_norm_clipped: after } = points.lines
    const isClipped = after.y.some((value, i) => value !== null && value !== before.y[i])
    if (!isClipped) return ours(screen, 'grad_norm', 'norm', colors.norm)
    return [
      ...ours(screen, 'grad_norm', 'before clipping', colors.norm, { trace: { opacity: 0.4 }, line: { width: 1 } }),
      ...ours(screen, 'grad_norm_clipped', 'after clipping', colors.norm),
    ]
  }
  return [
    {
      name: 'loss',
      title: 'Loss',
      group: '',
      has: !onlyMetrics || has('loss') || losses.length > 0,
      axis: lossAxis,
      lines: (screen, colors) => [
        ...lossLines(screen, colors),
        ...losses.flatMap(({ name, color }) => measured(screen, name, colors[color])),
      ],
    },
    ...(scaled
      ? [
          {
            name: 'scale',
            title: 'Loss scale',
            group: '',
            has: true,
            isLog: true,
            axis: scaleAxis,
            lines: (screen, colors) =>
              isScaled ? ours(screen, 'scale', 'scale', colors.scale, { line: { shape: 'hv', width: 2 } }) : [],
          },
        ]
      : []),
    {
      name: 'norm',
      title: 'Gradient norm',
      head: 'Norm',
      group: scaled ? 'gradients' : '',
      has: (!onlyMetrics && !points.last) || has('grad_norm'),
      isLog: true,
      lines: normLines,
    },
    ...arranged(
      names.filter((name) => !lossesOf(names).includes(name)),
      view,
    ).map((name) => ({
      name: labelOf(name),
      metric: name,
      title: labelOf(name),
      group: view.pinned.includes(name) ? 'pinned' : prefixOf(name),
      has: !COPIED.has(name) || !isCopy(points.metrics.get(name), points.lines[name]),
      axis: linearAxis,
      lines: (screen, colors) => measured(screen, name, colors.val),
    })),
    {
      name: 'data',
      title: 'Time per step, ms',
      group: 'throughput',
      has: points.hasWaits,
      axis: axisFromZero,
      lines: (screen, colors) => [
        ...milliseconds(screen, 'step_us', 'step', colors.data, { trace: { opacity: 0.4 }, line: { width: 1 } }),
        ...milliseconds(screen, 'data_us', 'waiting for data', colors.data),
      ],
    },
    {
      name: 'examples',
      title: 'Examples per second',
      group: 'throughput',
      has: examples > 0 && has('step_us'),
      axis: axisFromZero,
      lines: (screen, colors) =>
        converted(screen, 'step_us', (us) => (us ? (examples / us) * 1e6 : null), 'examples/s', colors.val),
    },
    {
      name: 'lr',
      title: 'Learning rate',
      group: 'optimizer',
      has: has('lr'),
      axis: axisFromZero,
      lines: (screen, colors) => ours(screen, 'lr', 'learning rate', colors.lr),
    },
  ]
}

/**
 * Return whether a metric has the values of a line of the steps, which a script may log again, with steps from 1 or from
 * 0; or a scale after its update, which is that of the next step.
 * @param {import('points').Line|undefined} metric
 * @param {import('points').Line} line
 */
const isCopy = (metric, line) => {
  if (!metric?.x.length) return false
  const at = new Map(line.x.map((step, i) => [step, line.y[i]]))
  const end = Number(line.x.at(-1))
  return [0, 1].some((shift) =>
    metric.x.every((step, i) => {
      if (step === end && shift) return metric.x.length > 1 // the next step is not there
      const [value, own] = [metric.y[i], at.get(step + shift)]
      return typeof value === 'number' && typeof own === 'number' && Math.abs(value - own) <= SAME * Math.abs(own)
    }),
  )
}

/** Labels stand beside the marker of the first step. */
const ROOM_OF_MARKERS = { ticks: 'outside', ticklen: 4, tickcolor: 'rgba(0,0,0,0)' }

const LOSS = /(\/|^(val|valid|validation|eval|test|dev)_)loss$/

/** Metrics that are drawn with the loss. @param {Iterable<string>} names */
export const lossesOf = (names) =>
  [...names]
    .filter((name) => LOSS.test(name))
    .sort(naturally)
    .slice(0, LOSSES)

/** Return the group of a metric. @param {string} name */
export const prefixOf = (name) => (name.includes('/') ? name.slice(0, name.indexOf('/') + 1) : '/')

/** Order texts by their numbers: layer2 before layer10. */
const { compare: naturally } = new Intl.Collator('en', { numeric: true })

/**
 * Metrics as people have them: pinned ones first, then by prefix.
 * @param {string[]} names
 * @param {import('url_state').View} view
 */
const arranged = (names, { pinned }) => {
  const rest = names.filter((name) => !pinned.includes(name))
  return [...pinned.filter((name) => names.includes(name)), ...rest.sort((a, b) => naturally(prefixOf(a), prefixOf(b)))]
}

/** @param {(number|null)[]} values @param {import('url_state').Range} [zoom] */
export const lossAxis = (values, zoom) => linearAxis(values, zoom, { fromZero: 'usually', labels: 6 })
/** @param {(number|null)[]} values @param {import('url_state').Range} [zoom] */
const axisFromZero = (values, zoom) => linearAxis(values, zoom, { fromZero: 'always' })

/** Powers of two, with room for one more on either side. @param {(number|null)[]} values */
export const scaleAxis = (values) => {
  const [lowest, highest] = positiveExtent(values).map(Math.log2)
  const [low, high] = [Math.floor(lowest) - 1, Math.ceil(highest) + 1]
  if (!Number.isFinite(low)) return { type: 'log' }
  const every = [1, 2, 4, 8, 10, 20, 40].find((step) => (high - low) / step <= 8) ?? 40
  const ticks = Array.from({ length: 400 }, (_, i) => i - 200).filter((e) => e % every === 0 && e > -126 && e < 128)
  return {
    type: 'log',
    range: [Math.log10(2 ** low), Math.log10(2 ** high)],
    tickmode: 'array',
    tickvals: ticks.map((e) => 2 ** e),
    ticktext: ticks.map(power),
  }
}

/**
 * The figure of one panel.
 * @param {Row} row @param {import('points').Points} points @param {import('url_state').View} view
 * @param {Record<string, string>} colors @param {{width: number, height: number}} size pixels of the plot
 */
export const figure = (row, points, view, colors, { width, height }) => {
  const pixels = Math.max(width - MARGIN.l - MARGIN.r, 100)
  const inner = Math.max(height - MARGIN.t - MARGIN.b, 20)
  const last = points.endOf(row.metric ? [row.metric] : row.name === 'loss' ? lossesOf(points.names) : [])
  const [first, end] = points.x([points.begin, last], view.x)
  /** @type {import('decimation').Screen} */
  const screen = { range: view.range ?? [first, end], pixels }
  const all = row.lines(screen, colors)
  const lines = all.map(({ name, line, opacity = 1, x, y, nonfinite }) => ({
    name,
    color: line.color,
    opacity,
    x,
    y,
    nonfinite,
    ...(row.name === 'scale' && { words: scaleText }),
  }))
  const traces = all.filter(({ name }) => !view.hidden.includes(name))
  const marked = traces.map(({ name, nonfinite }) => ({ label: name, color: colors.skip, nonfinite }))
  const isEmpty = traces.every(isEmptyLine)
  const values = valuesOf(traces)
  const { zoom, outliers } = chosenRange(
    row.name,
    view,
    () => traces.filter(({ meta }) => meta !== SMOOTHED),
    screen.range,
    row.isLog || view.logs.includes(row.name),
  )
  const ticks = ticksOf(screen.range, pixels, view.x in X_TITLES && view.x !== 'time')
  const title = X_TITLES[view.x] ?? view.x.slice(METRIC_AXIS.length)
  // Axis y spans the plot, behind the lines: marks of steps are there.
  const layout = {
    height,
    margin: MARGIN,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
    showlegend: false,
    hovermode: false,
    dragmode: 'zoom',
    yaxis: { type: 'linear', domain: [0, 1], range: [0, 1], fixedrange: true, visible: false },
    yaxis2: {
      domain: [0, 1],
      gridcolor: colors.grid,
      ...AXIS,
      automargin: false,
      ...ROOM_OF_MARKERS,
      ...(row.axis && !view.logs.includes(row.name) ? row.axis(values, zoom) : logAxis(values, zoom)),
      ...(isEmpty && { visible: false }),
      ...(zoom && { range: zoom, autorange: false }),
    },
    xaxis: {
      ...(isEmpty && !marked.some(({ nonfinite }) => nonfinite) && { visible: false }),
      anchor: 'y2',
      showgrid: false,
      ...AXIS,
      ...(ticks.length && { tickmode: 'array', tickvals: ticks, ticktext: ticks.map(tickText) }),
      ...(screen.range[0] < screen.range[1] && { range: screen.range, autorange: false }),
    },
    shapes: /** @type {object[]} */ (
      row.name === 'scale' && !isEmpty
        ? [
            {
              type: 'rect',
              layer: 'below',
              xref: 'paper',
              x0: 0,
              x1: 1,
              yref: 'y2',
              y0: 1e-38,
              y1: 1,
              fillcolor: colors.skip,
              opacity: 0.13,
              line: { width: 0 },
            },
          ]
        : []
    ),
  }
  const data = traces.map(({ nonfinite: _, ...trace }) => ({ ...trace, yaxis: 'y2' }))
  const marks = marksOf(points, view, inner, colors, screen, {
    isTicked: TICKED.has(row.name),
    isLoss: row.name === 'loss',
    lines: marked,
  })
  layout.shapes.push(...marks.shapes)
  data.push(...marks.traces.filter(({ x }) => x.length))
  const axis = { title, range: screen.range, left: MARGIN.l, pixels }
  return {
    data,
    layout,
    lines,
    outliers,
    marks: marks.traces.filter(({ text, name }) => text && name !== 'skips counted'),
    axis,
    title: escaped(row.title),
    drawn: points.count,
  }
}
