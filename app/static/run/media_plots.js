// Plots that a run logged: of classifiers, and figures of a script.
import { fittedPlot } from 'charts'
import { missing } from 'media_images'
import { count as countText, escaped, number, percent } from 'formats'

/**
 * data, layout: of a figure.
 * @typedef {{
 *   plot: string,
 *   title: string,
 *   classes?: string[],
 *   counts?: number[][],
 *   lines?: {name: string, x: number[], y: number[], area: number}[],
 *   data?: any[],
 *   layout?: any
 * }} Content
 */

const AXES = {
  pr_curve: ['recall', 'precision', 'AP'],
  roc_curve: ['false-positive rate', 'true-positive rate', 'AUC'],
}

/** @param {Content} content @param {Record<string, string>} colors */
const matrix = ({ classes = [], counts = [] }, colors) => {
  const names = classes.map(escaped)
  const totals = counts.map((row) => row.reduce((a, b) => a + b, 0))
  const shares = counts.map((row, i) => row.map((count) => (totals[i] ? count / totals[i] : 0)))
  const few = classes.length <= 12
  const most = Math.max(1, ...counts.flatMap((row, i) => row.filter((_, j) => j !== i)))
  // Right ones above 0, wrong ones below it, by count.
  const z = counts.map((row, i) => row.map((count, j) => count && (i === j ? 1 : -0.15 - (0.85 * count) / most)))
  return {
    data: [
      {
        type: 'heatmap',
        z,
        zmin: -1,
        zmax: 1,
        colorscale: [
          [0, colors.skip],
          [0.499, colors.card],
          [0.5, colors.grid],
          [0.51, colors.loss],
          [1, colors.loss],
        ],
        showscale: false,
        xgap: 1,
        ygap: 1,
        hoverinfo: 'none',
        x: names.map((_, i) => i),
        y: names.map((_, i) => i),
        customdata: counts.map((row, i) =>
          row.map(
            (count, j) => `true ${classes[i]}, predicted ${classes[j]}: ${countText(count)} (${percent(shares[i][j])})`,
          ),
        ),
      },
    ],
    layout: {
      annotations: few
        ? counts.flatMap((row, y) =>
            row.map((count, x) => ({
              x,
              y,
              text: count ? countText(count) : '',
              showarrow: false,
              font: { size: 11, color: x === y || z[y][x] < -0.7 ? colors.card : colors.text },
            })),
          )
        : [],
      xaxis: {
        fixedrange: true,
        tickmode: few ? 'array' : 'auto',
        tickvals: names.map((_, i) => i),
        ticktext: names,
        showgrid: false,
        zeroline: false,
      },
      yaxis: {
        fixedrange: true,
        tickmode: few ? 'array' : 'auto',
        tickvals: names.map((_, i) => i),
        ticktext: names,
        autorange: 'reversed',
        showgrid: false,
        zeroline: false,
        automargin: true,
      },
    },
  }
}

/** @param {Content} content @param {Record<string, string>} colors */
const curves = ({ plot, lines = [] }, colors) => {
  const [x, y, area] = AXES[plot]
  const axis = (title) => ({
    title: { text: title, standoff: 6 },
    range: [-0.02, 1.02],
    gridcolor: colors.grid,
    zeroline: false,
  })
  return {
    data: [
      ...lines.map((line, i) => ({
        type: 'scatter',
        mode: 'lines',
        x: line.x,
        y: line.y,
        name: `${escaped(line.name)} · ${area} ${number(line.area)}`,
        line: {
          color: colors[`run${i % 10}`],
          width: 1.8,
          dash: i < 10 ? 'solid' : 'dash',
          shape: plot === 'pr_curve' ? 'vh' : 'linear',
        },
      })),
      ...(plot === 'roc_curve'
        ? [
            {
              type: 'scatter',
              mode: 'lines',
              x: [0, 1],
              y: [0, 1],
              name: 'chance',
              showlegend: false,
              hoverinfo: 'skip',
              line: { color: colors.quiet, width: 1, dash: 'dot' },
            },
          ]
        : []),
    ],
    layout: {
      xaxis: axis(x),
      yaxis: axis(y),
      showlegend: true,
      legend: {
        x: plot === 'roc_curve' ? 0.98 : 0.02,
        xanchor: plot === 'roc_curve' ? 'right' : 'left',
        y: 0.02,
        yanchor: 'bottom',
        bgcolor: 'rgba(0,0,0,0)',
        font: { color: colors.text },
      },
    },
  }
}

/**
 * A figure that a script made, in the colors of the page where it names none.
 * @param {Content} content
 * @param {Record<string, string>} colors
 */
const scriptFigure = ({ data = [], layout = {} }, colors) => {
  const axes = Object.fromEntries(
    ['xaxis', 'yaxis'].map((name) => [
      name,
      { gridcolor: colors.grid, zerolinecolor: colors.grid, automargin: true, ...layout[name] },
    ]),
  )
  return {
    data: data.map((trace) => ({ ...trace, showlegend: trace.showlegend ?? Boolean(trace.name) })),
    layout: {
      colorway: [colors.loss, ...Array.from({ length: 9 }, (_, i) => colors[`run${i + 1}`])],
      ...layout,
      ...axes,
      autosize: true,
      width: undefined,
    },
  }
}

/** @param {Content & {height: number}} content @param {Record<string, string>} colors */
export const plotFigure = (content, colors) => {
  if (content.plot === 'figure') {
    const { data, layout } = scriptFigure(content, colors)
    return {
      data,
      layout: {
        margin: { l: 46, r: 13, t: 8, b: 34 },
        ...layout,
        height: content.height,
        paper_bgcolor: 'rgba(0,0,0,0)',
        plot_bgcolor: 'rgba(0,0,0,0)',
        font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
        hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
      },
      drawn: data.length,
    }
  }
  const { data, layout } = content.plot === 'confusion_matrix' ? matrix(content, colors) : curves(content, colors)
  return {
    data,
    layout: {
      ...layout,
      height: content.height,
      margin: content.plot === 'confusion_matrix' ? { l: 46, r: 13, t: 2, b: 22 } : { l: 54, r: 13, t: 4, b: 40 },
      dragmode: false,
      paper_bgcolor: 'rgba(0,0,0,0)',
      plot_bgcolor: 'rgba(0,0,0,0)',
      font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
      hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    },
    drawn: (content.counts ?? content.lines ?? []).length,
  }
}

/** Examples of a matrix: all, and those on its diagonal. @param {{counts?: number[][]}} content */
const totalsOf = ({ counts = [] }) => [
  counts.flat().reduce((a, b) => a + b, 0),
  counts.reduce((sum, row, i) => sum + row[i], 0),
]

/** The plot in words. @param {Content} content */
export const wordsOf = ({ title, plot, counts = [], lines = [] }) => {
  if (plot === 'figure') return title
  if (plot !== 'confusion_matrix')
    return `${title}: ${lines.map(({ name, area }) => `${name} ${AXES[plot][2]} ${number(area)}`).join(', ')}`
  const [total, right] = totalsOf({ counts })
  return `${title}: ${right} of ${total} examples on the diagonal`
}

/** @param {Content} content */
const factOf = (content) => {
  const [total, right] = totalsOf(content)
  return content.plot === 'confusion_matrix' && total ? `accuracy ${percent(right / total)}` : ''
}

/** @param {import('media').MediaCard} card @returns {import('media').ShowMedia} */
export const createPlot = ({ body, label, say, point }) => {
  const element = Object.assign(document.createElement('div'), { className: 'plot', role: 'img' })
  body.replaceChildren(element)
  const figure = fittedPlot(/** @type {any} */ (element), plotFigure, {
    plotly_hover: ({ points: [{ customdata }] }) => point(customdata ?? ''),
    plotly_unhover: () => point(''),
  })
  let shown = ''
  return async ([{ address }]) => {
    shown = address
    const answer = address ? await fetch(address) : null
    const content = answer?.ok ? await answer.json().catch(() => null) : null
    if (shown !== address) return
    if (!content || !(['confusion_matrix', 'figure'].includes(content.plot) || content.plot in AXES))
      return body.replaceChildren(missing())
    if (!element.isConnected) body.replaceChildren(element)
    element.setAttribute('aria-label', wordsOf(content))
    label({ confusion_matrix: 'Matrix', figure: 'Figure' }[content.plot] ?? 'Curves')
    say(factOf(content))
    figure.draw(content)
  }
}
