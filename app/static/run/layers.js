// How large each layer's gradients are over time: a thin line a layer, and the same as a heat map.
import { inTurn, insisted } from 'http'
import { logAxis } from 'axis'
import { createPlot } from 'charts'
import { escaped, number } from 'formats'

const [LINES, MAP] = [150, 300] // pixels
const GAP = 46
const MARGIN = { l: 62, r: 14, t: 30, b: 42 }
const NAME = 28 // characters of a layer's name beside the map; the whole one is in the hover

/** @typedef {{steps: number[], layers: string[], norms: (number|string|null)[][]}} LayerNorms */

/** What Plotly can put on a logarithmic axis; inf and NaN are gaps. @param {number|string|null} norm */
const drawable = (norm) => (typeof norm === 'number' && norm > 0 ? norm : null)

/** @param {string} name */
const shortened = (name) => (name.length > NAME ? `…${name.slice(1 - NAME)}` : name)

/** An axis of a heat map that names its rows, as many as can be read. @param {string[]} rows */
export const names = (rows) => {
  const every = Math.ceil(rows.length / 24)
  const named = rows.map((_, i) => i).filter((i) => i % every === 0)
  return { automargin: true, tickvals: named, ticktext: named.map((i) => escaped(shortened(rows[i]))) }
}

/** @param {LayerNorms} found @param {Record<string, string>} colors */
export const layersFigure = ({ steps, layers, norms }, colors) => {
  const inner = LINES + GAP + MAP
  const values = norms.map((row) => row.map(drawable))
  const lines = values.map((y, i) => ({
    x: steps, y, name: escaped(layers[i]), type: 'scatter', mode: 'lines', yaxis: 'y2', opacity: 0.55,
    line: { color: colors.norm, width: 1 }, text: norms[i].map((norm) => number(norm)), hovertemplate: `${escaped(layers[i])}, step %{x}: %{text}<extra></extra>`,
  }))
  const map = {
    type: 'heatmap', x: steps, y: layers.map((_, i) => i), z: values.map((row) => row.map((norm) => norm && Math.log10(norm))),
    colorscale: [[0, colors.card], [1, colors.norm]], hoverongaps: false,
    customdata: norms.map((row, i) => row.map((norm) => [escaped(layers[i]), number(norm)])),
    hovertemplate: '%{customdata[0]}, step %{x}: %{customdata[1]}<extra></extra>',
    colorbar: { title: { text: 'log₁₀ of the norm', side: 'right' }, thickness: 10, outlinewidth: 0, len: MAP / inner, y: 0, yanchor: 'bottom' },
  }
  const axis = { gridcolor: colors.grid, zeroline: false }
  const layout = {
    height: inner + MARGIN.t + MARGIN.b, margin: MARGIN, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false,
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, uirevision: 'same',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    xaxis: { title: { text: 'attempted step', standoff: 6 }, anchor: 'y', ...axis },
    yaxis: { domain: [0, MAP / inner], autorange: 'reversed', ...names(layers), ...axis },
    yaxis2: { domain: [(MAP + GAP) / inner, 1], ...logAxis(values.flat()), ...axis },
  }
  return { data: [map, ...lines], layout, drawn: steps.length }
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createLayers = (section, api) => {
  const plot = createPlot(section.querySelector('[data-layers-plot]'), layersFigure)
  const refresh = inTurn(async () => {
    const found = await (await insisted(`${api}/layer-norms`)).json()
    if (found.steps.length) plot.draw(found)
  })
  refresh()
  return { refresh }
}
