// How large the layers' gradients are over time: some of them as lines, all as a heat map.
import { inTurn, insisted } from 'http'
import { logAxis, positiveExtent } from 'axis'
import { fittedPlot } from 'charts'
import { count, escaped, number } from 'formats'
import { apart } from 'heatmap'

const MOST = 6 // layers that are drawn as lines
const NARROW = 500 // pixels
const [NAME, END] = [20, 13] // characters of a layer's name next to a map, and at the end of a line
const PLAIN = { paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)' }

/** @typedef {{steps: number[], layers: string[], norms: (number|string|null)[][]}} LayerNorms */

/** What Plotly can put on a logarithmic axis; inf and NaN are gaps. @param {number|string|null} norm */
const drawable = (norm) => (typeof norm === 'number' && norm > 0 ? norm : null)

/** @param {string} name @param {number} [most] characters */
const shortened = (name, most = NAME) => (name.length > most ? `…${name.slice(1 - most)}` : name)

/** An axis of a heat map that names its rows, as many as can be read. @param {string[]} rows */
export const names = (rows) => {
  const every = Math.ceil(rows.length / 24)
  const named = rows.map((_, i) => i).filter((i) => i % every === 0)
  return { automargin: true, tickvals: named, ticktext: named.map((i) => escaped(shortened(rows[i]))) }
}

/**
 * Layers that are drawn as lines: by their last norm the largest, the smallest and some between. forward: that must be
 * among them.
 * @param {LayerNorms} found
 * @param {string} [forward]
 * @returns {number[]}
 */
export const chosenLayers = ({ layers, norms }, forward) => {
  const last = norms.map((row) => row.map(drawable).findLast((norm) => norm !== null) ?? 0)
  const ranked = layers.map((_, i) => i).sort((a, b) => last[b] - last[a])
  const chosen =
    ranked.length <= MOST
      ? ranked
      : Array.from({ length: MOST }, (_, i) => ranked[Math.round((i * (ranked.length - 1)) / (MOST - 1))])
  const wanted = layers.indexOf(forward ?? '')
  return wanted < 0 || chosen.includes(wanted) ? chosen : [...chosen.slice(0, -1), wanted]
}

/**
 * Lines with their names at the ends.
 * @param {LayerNorms & {forward?: string, height: number, width: number}} wanted forward: the layer that is seen before
 *   the others
 * @param {Record<string, string>} colors
 */
export const layersFigure = ({ steps, layers, norms, forward, height, width }, colors) => {
  const lines = chosenLayers({ steps, layers, norms }, forward).map((layer, i) => ({
    layer,
    color: colors[`run${i}`],
    y: norms[layer].map(drawable),
  }))
  const isForward = lines.some(({ layer }) => layers[layer] === forward)
  const [least, most] = positiveExtent(lines.flatMap(({ y }) => y))
  const [low, high] = least <= most ? [Math.log10(least) - 0.1, Math.log10(most) + 0.1] : [0, 1]
  const axis = { ...logAxis([], [low, high]), range: [low, high], autorange: false }
  const margin = { l: 46, r: width < NARROW ? 74 : 96, t: 8, b: 24 }
  const pixels = Math.max(height - margin.t - margin.b, 20)
  const named = lines
    .map((line) => ({ ...line, last: line.y.findLast((norm) => norm !== null) }))
    .filter(({ last }) => last)
    .map((line) => ({ ...line, place: (pixels * (high - Math.log10(Number(line.last)))) / (high - low) }))
    .sort((a, b) => a.place - b.place)
  const places = apart(
    named.map(({ place }) => place),
    13,
    pixels - 4,
  )
  return {
    data: lines.map(({ layer, color, y }) => ({
      x: steps,
      y,
      name: escaped(layers[layer]),
      type: 'scatter',
      mode: steps.length > 1 ? 'lines' : 'markers',
      opacity: isForward && layers[layer] !== forward ? 0.25 : 1,
      line: { color, width: layers[layer] === forward ? 3 : 1.6 },
      marker: { color, size: 6 },
      text: norms[layer].map((norm) => number(norm)),
      hovertemplate: `${escaped(layers[layer])}, step %{x}: %{text}<extra></extra>`,
    })),
    layout: {
      height,
      margin,
      ...PLAIN,
      showlegend: false,
      dragmode: false,
      font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
      uirevision: 'same',
      hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
      annotations: named.map(({ layer, color }, i) => ({
        x: 1,
        xref: 'paper',
        xanchor: 'left',
        xshift: 6,
        y: 1,
        yref: 'paper',
        yanchor: 'middle',
        yshift: -places[i],
        showarrow: false,
        text: `<b>${escaped(shortened(layers[layer], END))}</b>`,
        font: { color },
      })),
      xaxis: {
        showgrid: false,
        zeroline: false,
        fixedrange: true,
        nticks: 8,
        tickformat: ',d',
        ...(steps.length > 1 && { range: [steps[0], steps[steps.length - 1]] }),
      },
      yaxis: { ...axis, gridcolor: colors.grid, zeroline: false, fixedrange: true },
    },
    drawn: steps.length,
  }
}

/**
 * A heat map of rows by step, whose cells are read in the head of its panel.
 * @param {{
 *   steps: number[],
 *   rows: string[],
 *   z: (number|null)[][],
 *   words: string[][],
 *   height: number,
 *   more?: any
 * }} wanted
 * @param {Record<string, string>} colors
 */
export const rowsFigure = ({ steps, rows, z, words, height, more }, colors) => ({
  data: [
    {
      type: 'heatmap',
      x: steps,
      y: rows.map((_, i) => i),
      z,
      hoverongaps: false,
      showscale: false,
      hoverinfo: 'none',
      customdata: words,
      ...more(colors),
    },
  ],
  layout: {
    height,
    margin: { l: 46, r: 16, t: 8, b: 24 },
    ...PLAIN,
    dragmode: false,
    font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
    uirevision: 'same',
    xaxis: { showgrid: false, zeroline: false, fixedrange: true, nticks: 8, tickformat: ',d' },
    yaxis: { autorange: 'reversed', ...names(rows), showgrid: false, zeroline: false, fixedrange: true },
  },
  drawn: steps.length,
})

/** @param {Found} panel @param {string} part where it is drawn */
export const createRowsMap = (panel, part) => {
  const head = panel.querySelector('[data-pointed]')
  const usual = head.textContent
  return fittedPlot(panel.querySelector(part), rowsFigure, {
    plotly_hover: ({ points: [{ customdata }] }) => {
      head.textContent = customdata
    },
    plotly_unhover: () => {
      head.textContent = usual
    },
  })
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createLayers = (section, api) => {
  const page = /** @type {Found} */ (section.closest('[data-panel]'))
  const plot = fittedPlot(/** @type {Found} */ (section.querySelector('[data-layers-plot]')), layersFigure)
  const map = createRowsMap(page.querySelector('[data-layer-map]'), '[data-map-plot]')
  /** @type {LayerNorms|null} */
  let found = null
  /** @type {string|undefined} */
  let forward
  const draw = () => {
    if (found) plot.draw({ ...found, forward })
  }
  const bring = ({ target, type }) => {
    const row = type === 'pointerleave' || type === 'focusout' ? null : target.closest('[data-layer]')
    if (forward === row?.dataset.layer) return
    forward = row?.dataset.layer
    draw()
  }
  for (const name of ['pointerover', 'pointerleave', 'focusin', 'focusout'])
    page.querySelector('#headroom')?.addEventListener(name, bring)
  const refresh = inTurn(async () => {
    found = /** @type {LayerNorms} */ (await (await insisted(`${api}/layer-norms`)).json())
    const { steps, layers, norms } = found
    if (!steps.length) return
    draw()
    map.draw({
      steps,
      rows: layers,
      z: norms.map((row) => row.map(drawable).map((norm) => norm && Math.log10(norm))),
      words: norms.map((row, i) => row.map((norm, j) => `${layers[i]}, step ${count(steps[j])}: ${number(norm)}`)),
      more: (colors) => ({
        colorscale: [
          [0, colors.card],
          [1, colors.norm],
        ],
      }),
    })
  })
  refresh()
  return { refresh }
}
