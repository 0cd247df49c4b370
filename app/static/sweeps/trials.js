// The value of each run of a sweep in order, and the best until then; and its settings beside the
// value, as Plotly wants them.

import { escaped } from 'formats'
import { parallelFigure } from 'parallel'

const HEIGHT = 320
const BEST = 3 // lines that stand out
const LOG_FROM = 100 // how many times the smallest the largest is, for a log axis

/** The best of each value and those before it. @param {number[]} values @param {string} goal */
const running = (values, goal) => {
  /** @type {number|null} */
  let best = null
  return values.map((value) => {
    if (best === null || (goal === 'minimise' ? value < best : value > best)) best = value
    return best
  })
}

const basics = (colors) => ({
  height: HEIGHT, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
  font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, dragmode: false,
})

/** What stands there until there is something to draw. @param {Record<string, string>} colors */
const nothing = (colors) => {
  const text = { text: 'Nothing yet: it begins with the first value.', x: 0.5, y: 0.5, xref: 'paper', yref: 'paper', showarrow: false }
  return { data: [], layout: { ...basics(colors), xaxis: { visible: false }, yaxis: { visible: false }, annotations: [text] }, drawn: 0 }
}

/** The figure of settings beside the metric, in which the best stand out. @param {any} wanted as `parallelFigure` takes it, the best first @param {Record<string, string>} colors */
export const settingsFigure = (wanted, colors) => {
  if (!wanted.ids.length) return nothing(colors)
  const made = parallelFigure(wanted, colors)
  const grey = { marker: { size: 4, color: colors.quiet }, line: { color: colors.quiet, width: 1 }, opacity: 0.35 }
  const data = made.data.map((trace, i) => (i < BEST ? { ...trace, line: { ...trace.line, width: 2.5 } } : { ...trace, ...grey }))
  return { ...made, data: data.reverse() }
}

/** @param {{trials: any[], metric: string, goal: string}} wanted as the API has them, in order @param {Record<string, string>} colors */
export const trialsFigure = ({ trials, metric, goal }, colors) => {
  const of = (state) => trials.filter((trial) => trial.state === state && (state === 'failed' || typeof trial.value === 'number'))
  const [complete, open, pruned, failed] = ['complete', 'open', 'pruned', 'failed'].map(of)
  const values = [...complete, ...open, ...pruned].map(({ value }) => value)
  if (!values.length && !failed.length) return nothing(colors)
  const last = trials.at(-1).number
  const [low, high] = [Math.min(...values), Math.max(...values)]
  const isLog = low > 0 && high / low >= LOG_FROM
  const dots = (some, name, y, marker) => ({
    x: some.map(({ number }) => number), y, name, text: some.map((trial) => escaped(trial.name)), customdata: some.map((trial) => trial.run_id),
    type: 'scatter', mode: 'markers', cliponaxis: false, marker: { size: 9, line: { width: 1, color: colors.card }, ...marker },
    hovertemplate: `%{text}<br>${name} %{y:.5g}<extra></extra>`,
  })
  const data = [
    { x: complete.map(({ number }) => number), y: running(complete.map(({ value }) => value), goal), name: 'best until then', type: 'scatter', mode: 'lines', hoverinfo: 'skip', line: { shape: 'hv', color: colors.val, width: 2 } },
    dots(complete, 'ended at', complete.map(({ value }) => value), { color: colors.loss }),
    dots(open, 'so far', open.map(({ value }) => value), { color: colors.card, line: { width: 2, color: colors.loss } }),
    dots(pruned, 'given up at', pruned.map(({ value }) => value), { color: colors.quiet, symbol: 'diamond' }),
    { ...dots(failed, 'without a value', failed.map(() => 0.02), { color: colors.skip, symbol: 'x', line: { width: 0 } }), yaxis: 'y2', hovertemplate: '%{text}<br>without a value<extra></extra>' },
  ].filter(({ x }) => x.length)
  const layout = {
    ...basics(colors), margin: { l: 62, r: 14, t: 30, b: 42 }, hovermode: 'closest',
    showlegend: true, legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom' },
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: { title: { text: 'run', standoff: 6 }, gridcolor: colors.grid, zeroline: false, fixedrange: true, range: [0, last + 1], tick0: 0, dtick: Math.ceil(last / 10) },
    yaxis: { type: isLog ? 'log' : 'linear', title: { text: escaped(metric.length > 30 ? `${metric.slice(0, 29)}…` : metric), standoff: 6 }, gridcolor: colors.grid, zeroline: false, automargin: true, fixedrange: true, ...(isLog && { exponentformat: 'power' }) },
    yaxis2: { overlaying: 'y', range: [0, 1], visible: false, fixedrange: true },
  }
  return { data, layout, drawn: trials.length }
}
