// Plots that a run logged: confusion matrix, precision-recall and ROC curves, as Plotly wants them.
import { fittedPlot } from 'charts'
import { count as countText, escaped, number, percent } from 'formats'

/** @typedef {{plot: string, title: string, classes?: string[], counts?: number[][], lines?: {name: string, x: number[], y: number[], area: number}[]}} Content */

const AXES = { pr_curve: ['recall', 'precision', 'AP'], roc_curve: ['false-positive rate', 'true-positive rate', 'AUC'] }

/** @param {Content} content @param {Record<string, string>} colors */
const matrix = ({ classes = [], counts = [] }, colors) => {
  const names = classes.map(escaped)
  const totals = counts.map((row) => row.reduce((a, b) => a + b, 0))
  const shares = counts.map((row, i) => row.map((count) => (totals[i] ? count / totals[i] : 0)))
  const few = classes.length <= 12
  return {
    data: [{
      type: 'heatmap', z: shares, zmin: 0, zmax: 1, colorscale: [[0, colors.card], [1, colors.loss]], showscale: !few, colorbar: { thickness: 10, outlinewidth: 0, tickformat: '.0%' },
      x: names.map((_, i) => i), y: names.map((_, i) => i), customdata: counts.map((row, i) => row.map((count, j) => `${countText(count)} (${percent(shares[i][j])})`)),
      hovertemplate: 'true %{y}, predicted %{x}: %{customdata}<extra></extra>',
    }],
    layout: {
      annotations: few ? counts.flatMap((row, y) => row.map((count, x) => ({ x, y, text: countText(count), showarrow: false, font: { size: 11, color: shares[y][x] > 0.5 ? colors.card : colors.text } }))) : [],
      xaxis: { title: { text: 'predicted class', standoff: 6 }, tickmode: few ? 'array' : 'auto', tickvals: names.map((_, i) => i), ticktext: names, showgrid: false, zeroline: false, constrain: 'domain' },
      yaxis: { title: { text: 'true class', standoff: 6 }, tickmode: few ? 'array' : 'auto', tickvals: names.map((_, i) => i), ticktext: names, autorange: 'reversed', showgrid: false, zeroline: false, automargin: true },
    },
  }
}

/** @param {Content} content @param {Record<string, string>} colors */
const curves = ({ plot, lines = [] }, colors) => {
  const [x, y, area] = AXES[plot]
  const axis = (title) => ({ title: { text: title, standoff: 6 }, range: [-0.02, 1.02], gridcolor: colors.grid, zeroline: false })
  return {
    data: [
      ...lines.map((line, i) => ({
        type: 'scatter', mode: 'lines', x: line.x, y: line.y, name: `${escaped(line.name)} · ${area} ${number(line.area)}`,
        line: { color: colors[`run${i % 10}`], width: 1.8, dash: i < 10 ? 'solid' : 'dash', shape: plot === 'pr_curve' ? 'vh' : 'linear' },
      })),
      ...(plot === 'roc_curve' ? [{ type: 'scatter', mode: 'lines', x: [0, 1], y: [0, 1], name: 'chance', showlegend: false, hoverinfo: 'skip', line: { color: colors.quiet, width: 1, dash: 'dot' } }] : []),
    ],
    layout: { xaxis: axis(x), yaxis: axis(y), showlegend: true, legend: { x: plot === 'roc_curve' ? 0.98 : 0.02, xanchor: plot === 'roc_curve' ? 'right' : 'left', y: 0.02, yanchor: 'bottom', bgcolor: 'rgba(0,0,0,0)', font: { color: colors.text } } },
  }
}

/** @param {Content & {height: number}} content @param {Record<string, string>} colors */
export const plotFigure = (content, colors) => {
  const { data, layout } = content.plot === 'confusion_matrix' ? matrix(content, colors) : curves(content, colors)
  return {
    data,
    layout: {
      ...layout, height: content.height, margin: { l: 62, r: 16, t: 10, b: 52 }, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet }, hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    },
    drawn: (content.counts ?? content.lines ?? []).length,
  }
}

/** The plot in words. @param {Content} content */
export const wordsOf = ({ title, plot, counts = [], lines = [] }) => {
  if (plot !== 'confusion_matrix') return `${title}: ${lines.map(({ name, area }) => `${name} ${AXES[plot][2]} ${number(area)}`).join(', ')}`
  const total = counts.flat().reduce((a, b) => a + b, 0)
  const right = counts.reduce((sum, row, i) => sum + row[i], 0)
  return `${title}: ${right} of ${total} examples on the diagonal`
}

/** @param {string} name */
export const createClassifierPlot = (name) => {
  const element = Object.assign(document.createElement('div'), { className: 'plot', role: 'img' })
  element.setAttribute('aria-label', name)
  /** @type {ReturnType<typeof fittedPlot>|null} */
  let figure = null
  let shown = ''
  return {
    element,
    /** Show the plot of a file. @param {string} address */
    show: async (address) => {
      shown = address
      const answer = await fetch(address)
      const content = answer.ok ? await answer.json().catch(() => null) : null
      if (shown !== address) return
      if (!content || !(content.plot === 'confusion_matrix' || content.plot in AXES)) {
        element.textContent = 'The file cannot be read.'
        return
      }
      element.setAttribute('aria-label', wordsOf(content))
      figure ??= fittedPlot(/** @type {any} */ (element), plotFigure) // once it stands in the page
      figure.draw(content)
    },
  }
}
