// The points of a precision plan in Plotly's format. Draws nothing itself.
import { escaped, number } from 'formats'

const [SHORT, COSINE] = [3, 6] // digits of a time and of a cosine
const COLORS = { fp16: 'loss', bf16: 'val', fp32: 'quiet' }

/**
 * @typedef {{
 *   precision: string,
 *   error: number|string,
 *   time: number,
 *   cosine: number|string,
 *   is_within: boolean,
 *   label: string,
 *   init_scale: number|null
 * }} Point
 */
/** @typedef {{points: Point[], max_error: number, cost: string}} Plan */

/**
 * Lowest and highest error that the axis has; 0 and infinity lie at its ends.
 * @param {Plan} plan
 * @returns {[number, number]} powers of ten
 */
export const ends = ({ points, max_error: bound }) => {
  const finite = [...points.map(({ error }) => Number(error)), Number(bound)].filter(
    (error) => error > 0 && Number.isFinite(error),
  )
  const powers = (finite.length ? finite : [1]).map(Math.log10)
  return [Math.floor(Math.min(...powers)) - 1, Math.ceil(Math.max(...powers)) + 1]
}

/** @param {Plan} plan @param {Record<string, string>} colors */
export const planFigure = (plan, colors) => {
  const [low, high] = ends(plan)
  const drawable = (error) => 10 ** Math.min(Math.max(Math.log10(Number(error)), low), high)
  const data = Object.entries(COLORS).flatMap(([precision, color]) => {
    const own = plan.points.filter((point) => point.precision === precision)
    return own.length
      ? [
          {
            type: 'scatter',
            mode: 'markers',
            name: precision,
            x: own.map(({ time }) => time),
            y: own.map(({ error }) => drawable(error)),
            marker: {
              size: 11,
              color: colors[color],
              symbol: own.map(({ is_within: isWithin }) => (isWithin ? 'circle' : 'circle-open')),
              line: { width: 2, color: colors[color] },
            },
            cliponaxis: false,
            customdata: own.map(({ label, time, error, cosine }) => [
              escaped(label),
              number(time, SHORT),
              number(error),
              number(cosine, COSINE),
            ]),
            hovertemplate:
              '%{customdata[0]}<br>time %{customdata[1]}, error %{customdata[2]}, cosine %{customdata[3]}<extra></extra>',
          },
        ]
      : []
  })
  let least = Infinity // points with fewer modules may have the same time and more error
  const beyond = plan.points.filter(({ error }) => {
    const isLess = Number(error) < least
    if (isLess) least = Number(error)
    return isLess
  })
  const front = {
    type: 'scatter',
    mode: 'lines',
    name: 'front',
    x: beyond.map(({ time }) => time),
    y: beyond.map(({ error }) => drawable(error)),
    line: { shape: 'hv', width: 1, dash: 'dot', color: colors.quiet },
    hoverinfo: 'skip',
    showlegend: false,
  }
  const bound = {
    type: 'line',
    xref: 'paper',
    x0: 0,
    x1: 1,
    y0: Number(plan.max_error),
    y1: Number(plan.max_error),
    line: { color: colors.skip, width: 2, dash: 'dash' },
  }
  const POWERS = 1.25 // Plotly makes powers larger
  const axis = { gridcolor: colors.grid, zeroline: false, tickfont: { size: 11 } }
  const title = (text) => ({ text, font: { size: 12 }, standoff: 6 })
  const layout = {
    height: 420,
    margin: { l: 62, r: 14, t: 30, b: 46 },
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet },
    uirevision: 'same',
    shapes: Number(plan.max_error) > 0 ? [bound] : [],
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: { color: colors.text } },
    xaxis: {
      title: title(
        plan.cost === 'measured' ? 'measured time, relative to fp32' : 'predicted time for a GPU, relative to fp32',
      ),
      rangemode: 'tozero',
      ...axis,
    },
    yaxis: {
      type: 'log',
      range: [low, high],
      dtick: 1,
      exponentformat: 'power',
      title: title('error of the gradient'),
      ...axis,
      tickfont: { size: 11 / POWERS },
    },
  }
  return { data: [front, ...data], layout, drawn: plan.points.length }
}
