// The losses of several runs in one figure, as Plotly wants it. Draws nothing itself.
import { lossAxis } from 'figure'
import { smoothed } from 'points'

/** A colour a run, in the order of the table, as diagnosis.css has them. */
const LINES = ['loss', 'skip', 'scale', 'val', 'norm']

/**
 * @typedef {{label: string, points: import('points').Points}} Drawn
 * @param {{runs: Drawn[], view: import('view').View}} wanted @param {Record<string, string>} colors
 */
export const comparisonFigure = ({ runs, view }, colors) => {
  const losses = runs.map(({ points }) => points.lines.loss)
  const data = runs.flatMap(({ label, points }, i) => {
    const color = colors[LINES[i % LINES.length]]
    const { x, y } = points.means.loss ?? losses[i]
    const raw = { ...losses[i], name: label, type: 'scatter', mode: 'lines', legendgroup: label, hovertemplate: '%{y:.5~g}', line: { color, width: 3.2 - 0.6 * i } }
    if (!view.smooth) return [raw]
    return [
      { ...raw, opacity: 0.25, line: { color, width: 1 }, showlegend: false, hoverinfo: 'skip', hovertemplate: null },
      { ...raw, x, y: smoothed(y, view.smooth), line: { color, width: 3.4 - 0.5 * i } },
    ]
  })
  runs.forEach(({ label, points }, i) => data.push(skips(label, points.skips.steps, i, runs.length, colors)))
  const title = (text) => ({ text, standoff: 6 })
  const layout = {
    margin: { l: 62, r: 14, t: 30, b: 42 }, height: 420, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, hovermode: 'x unified',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: { color: colors.text } }, uirevision: view.loss,
    xaxis: { title: title('attempted step'), gridcolor: colors.grid, zeroline: false, anchor: 'y2' },
    yaxis: { title: title('loss'), gridcolor: colors.grid, zeroline: false, domain: [0.04 * runs.length / 2, 1], ...lossAxis(view, losses.flatMap(({ y }) => y)) },
    yaxis2: { domain: [0, 0.04 * runs.length / 2], range: [0, runs.length], visible: false, fixedrange: true },
  }
  return { data, layout, drawn: losses.reduce((sum, { x }) => sum + x.length, 0) }
}

/** A tick at each skipped step, a row of its own for each run. */
const skips = (label, steps, i, rows, colors) => ({
  x: steps.flatMap((step) => [step, step, null]),
  y: steps.flatMap(() => [rows - 1 - i, rows - 0.3 - i, null]),
  yaxis: 'y2', type: 'scatter', mode: 'lines', legendgroup: label, showlegend: false, hoverinfo: 'skip',
  line: { color: colors[LINES[i % LINES.length]], width: 1.5 },
})
