// The value of each trial of a sweep in order, and the best until then; by each setting; and its
// settings beside the value, as Plotly wants them. The better a trial, the stronger its colour.

import { linearAxis, logAxis } from 'axis'
import { escaped, number } from 'formats'
import { parallelFigure } from 'parallel'

const LOG_FROM = 100 // how many times the smallest the largest is, for a log axis of values
const LOG_SETTING = 20 // and of a setting
const FAINT = 0.3 // opacity of the worst

/** The best of each value and those before it. @param {number[]} values @param {string} goal */
const running = (values, goal) => {
  /** @type {number|null} */
  let best = null
  return values.map((value) => {
    if (best === null || (goal === 'minimize' ? value < best : value > best)) best = value
    return best
  })
}

/**
 * Opacity by rank, of trials with values.
 * @param {any[]} trials
 * @param {string} goal
 * @returns {(trial: any) => number}
 */
const strengths = (trials, goal) => {
  const ranked = trials.toSorted((a, b) => (goal === 'minimize' ? a.value - b.value : b.value - a.value))
  const ranks = new Map(ranked.map(({ number }, i) => [number, i]))
  return ({ number }) => 1 - ((1 - FAINT) * (ranks.get(number) ?? 0)) / Math.max(ranked.length - 1, 1)
}

const basics = (colors, height) => ({
  height,
  paper_bgcolor: 'rgba(0,0,0,0)',
  plot_bgcolor: 'rgba(0,0,0,0)',
  margin: { l: 52, r: 14, t: 8, b: 28 },
  font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
  dragmode: false,
  showlegend: false,
  hovermode: 'closest',
  hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
})

/** Return the placeholder of an empty plot. @param {Record<string, string>} colors @param {number} height */
const nothing = (colors, height) => {
  const text = { text: 'No values', x: 0.5, y: 0.5, xref: 'paper', yref: 'paper', showarrow: false }
  return {
    data: [],
    layout: { ...basics(colors, height), xaxis: { visible: false }, yaxis: { visible: false }, annotations: [text] },
    drawn: 0,
  }
}

/**
 * @param {any[]} some
 * @param {string} name
 * @param {any[]} x
 * @param {any[]} y
 * @param {any} marker
 * @param {Record<string, string>} colors
 */
const dots = (some, name, x, y, marker, colors) => ({
  x,
  y,
  name,
  text: some.map((trial, i) => `${escaped(trial.name)}<br>${name} ${number(y[i])}`),
  customdata: some.map((trial) => trial.run_id),
  type: 'scatter',
  mode: 'markers',
  cliponaxis: false,
  marker: { size: 9, line: { width: 1, color: colors.card }, ...marker },
  hovertemplate: '%{text}<extra></extra>',
})

/** A ring around the best. @param {any} x @param {number} y @param {Record<string, string>} colors */
const ring = (x, y, colors) => ({
  x: [x],
  y: [y],
  name: 'best',
  type: 'scatter',
  mode: 'markers',
  hoverinfo: 'skip',
  cliponaxis: false,
  marker: { symbol: 'circle-open', size: 16, color: colors.good, line: { width: 2, color: colors.good } },
})

/** An axis of numbers. @param {number[]} values @param {number} from @param {Record<string, string>} colors */
const axisOf = (values, from, colors) => {
  const [low, high] = [Math.min(...values), Math.max(...values)]
  const isLog = low > 0 && high / low >= from
  return {
    type: 'linear',
    gridcolor: colors.grid,
    zeroline: false,
    fixedrange: true,
    ...(isLog ? logAxis(values) : linearAxis(values, undefined, { labels: 5 })),
  }
}

/**
 * The figure of settings beside the metric, the best on top.
 * @param {any} wanted as `parallelFigure` takes it, the best first
 * @param {Record<string, string>} colors
 */
export const settingsFigure = (wanted, colors) => {
  if (!wanted.ids.length) return nothing(colors, wanted.height)
  const made = parallelFigure(wanted, colors)
  const data = made.data.map((trace, i) => ({
    ...trace,
    mode: 'lines',
    opacity: i ? 0.75 - (0.55 * i) / Math.max(made.data.length - 1, 1) : 1,
    line: { color: i ? colors.loss : colors.good, width: i ? 1.5 : 3 },
  }))
  return { ...made, data: data.reverse() }
}

/** The best of complete trials. @param {any[]} complete @param {string} goal */
const bestOf = (complete, goal) => {
  const value = running(
    complete.map((trial) => trial.value),
    goal,
  ).at(-1)
  return complete.find((trial) => trial.value === value)
}

/**
 * @param {{trials: any[], metric: string, goal: string, height: number}} wanted as the API has them, in order
 * @param {Record<string, string>} colors
 */
export const trialsFigure = ({ trials, goal, height }, colors) => {
  const of = (state) =>
    trials.filter((trial) => trial.state === state && (state === 'failed' || typeof trial.value === 'number'))
  const [complete, open, pruned, failed] = ['complete', 'open', 'pruned', 'failed'].map(of)
  const values = [...complete, ...open, ...pruned].map(({ value }) => value)
  if (!values.length && !failed.length) return nothing(colors, height)
  const last = trials.at(-1).number
  const strength = strengths(complete, goal)
  const best = bestOf(complete, goal)
  const numbers = (some) => some.map(({ number }) => number)
  const valuesOf = (some) => some.map(({ value }) => value)
  const data = [
    {
      x: numbers(complete),
      y: running(valuesOf(complete), goal),
      name: 'best until then',
      type: 'scatter',
      mode: 'lines',
      hoverinfo: 'skip',
      line: { shape: 'hv', color: colors.good, width: 2 },
    },
    dots(
      complete,
      'ended at',
      numbers(complete),
      valuesOf(complete),
      { color: colors.loss, opacity: complete.map(strength) },
      colors,
    ),
    dots(
      open,
      'so far',
      numbers(open),
      valuesOf(open),
      { color: colors.card, line: { width: 2, color: colors.loss } },
      colors,
    ),
    dots(pruned, 'pruned at', numbers(pruned), valuesOf(pruned), { color: colors.quiet, symbol: 'diamond' }, colors),
    {
      ...dots(
        failed,
        'no value',
        numbers(failed),
        failed.map(() => 0.02),
        { color: colors.skip, symbol: 'x', line: { width: 0 } },
        colors,
      ),
      yaxis: 'y2',
      text: failed.map((trial) => `${escaped(trial.name)}<br>no value`),
    },
    ...(best ? [ring(best.number, best.value, colors)] : []),
  ].filter(({ x }) => x.length)
  const layout = {
    ...basics(colors, height),
    xaxis: {
      gridcolor: colors.grid,
      showgrid: false,
      zeroline: false,
      fixedrange: true,
      range: [0, last + 1],
      tick0: 0,
      dtick: Math.ceil(last / 10),
    },
    yaxis: axisOf(values, LOG_FROM, colors),
    yaxis2: { overlaying: 'y', range: [0, 1], visible: false, fixedrange: true },
  }
  return { data, layout, drawn: trials.length }
}

/**
 * The values by one setting.
 * @param {{trials: any[], path: string, goal: string, height: number}} wanted
 * @param {Record<string, string>} colors
 */
export const settingFigure = ({ trials, path, goal, height }, colors) => {
  const complete = trials.filter(
    ({ state, value, params }) => state === 'complete' && typeof value === 'number' && params[path] !== undefined,
  )
  if (!complete.length) return nothing(colors, height)
  const strength = strengths(complete, goal)
  const best = bestOf(complete, goal)
  const isNumeric = complete.every(({ params }) => typeof params[path] === 'number')
  const at = ({ params }) =>
    isNumeric ? params[path] : escaped(typeof params[path] === 'string' ? params[path] : JSON.stringify(params[path]))
  const choices = new Set(complete.map(at))
  // Few values are named each, evenly apart.
  const isNamed = !isNumeric || (choices.size <= 6 && choices.size < complete.length)
  const x = isNamed ? (trial) => String(at(trial)) : at
  const layout = {
    ...basics(colors, height),
    xaxis: isNamed
      ? {
          type: 'category',
          showgrid: false,
          fixedrange: true,
          categoryorder: 'array',
          categoryarray: [...choices].sort((a, b) => (isNumeric ? a - b : a < b ? -1 : 1)).map(String),
        }
      : { ...axisOf(complete.map(at), LOG_SETTING, colors), showgrid: false },
    yaxis: axisOf(
      complete.map(({ value }) => value),
      LOG_FROM,
      colors,
    ),
  }
  return {
    data: [
      dots(
        complete,
        'ended at',
        complete.map(x),
        complete.map(({ value }) => value),
        { color: colors.loss, opacity: complete.map(strength) },
        colors,
      ),
      ring(x(best), best.value, colors),
    ],
    layout,
    drawn: complete.length,
  }
}
