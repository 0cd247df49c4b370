// All differing settings side by side, and one figure: a line per run. Plotly's own parallel
// coordinates make code out of texts, which our content security policy forbids.
import { strokeOf } from 'comparison'
import { escaped, number } from 'formats'
import { placesOf } from 'run_colors'

const MOST = 10 // settings beside each other

/**
 * Return each value's position between the lowest, 0, and the highest, 1; texts are evenly spaced in their order.
 * @param {any[]} values
 */
const scaleOf = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined)
  if (known.every((value) => typeof value === 'number')) {
    const [low, high] = [Math.min(...known), Math.max(...known)]
    const isLog = low > 0 && high / low >= 20
    const at = (value) => (isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1))
    return { at, ends: [low, high].map((value) => number(value)) }
  }
  const texts = [...new Set(known.map(String))].sort()
  return {
    at: (value) => texts.indexOf(String(value)) / Math.max(texts.length - 1, 1),
    ends: [texts[0], texts[1] && texts.at(-1)],
  }
}

/**
 * @param {{
 *   ids: string[],
 *   labels: Record<string, string>,
 *   columns: Map<string, any[]>,
 *   settings: string[],
 *   up: string,
 *   height?: number,
 *   width?: number
 * }} wanted
 * @param {Record<string, string>} colors
 */
export const parallelFigure = ({ ids, labels, columns, settings, up, height = 320, width = 900 }, colors) => {
  const names = [...settings.filter((name) => name !== up).slice(0, MOST), up]
  const scales = names.map((name) => scaleOf(columns.get(name) ?? []))
  const places = placesOf(ids)
  const data = ids.map((id, i) => {
    const stroke = strokeOf(places.get(id) ?? 0, colors)
    const values = names.map((name) => columns.get(name)?.[i] ?? null)
    return {
      x: names.map((_, j) => j),
      y: values.map((value, j) => (value === null ? null : scales[j].at(value))),
      text: values.map((value, j) => escaped(`${names[j]} ${value}`)),
      name: escaped(labels[id]),
      type: 'scatter',
      mode: 'lines+markers',
      connectgaps: true,
      hovertemplate: '%{fullData.name}<br>%{text}<extra></extra>',
      marker: { size: 6, color: stroke.color },
      line: { ...stroke, width: 1.5 },
    }
  })
  const most = Math.max(4, Math.min(18, Math.floor(width / names.length / 7)))
  const short = (text) => (text.length > most ? `${text.slice(0, most - 1)}…` : text)
  const note = (text, x, y, more) => ({
    text: escaped(short(text)),
    x,
    y,
    showarrow: false,
    font: { size: 11, color: colors.quiet },
    ...more,
  })
  const layout = {
    margin: { l: 70, r: 70, t: 24, b: 52 },
    height,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet },
    showlegend: false,
    hovermode: 'closest',
    dragmode: false,
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: {
      showgrid: true,
      gridcolor: colors.edge,
      zeroline: false,
      tickvals: names.map((_, j) => j),
      showticklabels: false,
      fixedrange: true,
      range: [-0.1, names.length - 0.9],
    },
    yaxis: { visible: false, fixedrange: true, range: [-0.06, 1.06] },
    annotations: names.flatMap((name, j) => [
      note(scales[j].ends[1] ?? '', j, 1, { yanchor: 'bottom', yshift: 10 }),
      note(scales[j].ends[0] ?? '', j, 0, { yanchor: 'top', yshift: -10 }),
      note(settings.includes(name) ? name.split('.').at(-1) : name, j, 0, {
        yanchor: 'top',
        yshift: -26,
        font: { size: 12, color: colors.text },
      }),
    ]),
  }
  return { data, layout, drawn: data.length }
}
