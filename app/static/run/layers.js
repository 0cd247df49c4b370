// How large the layers' gradients are over time: some of them as lines, all as a heat map.
import { inTurn, insisted } from 'http'
import { logAxis, positiveExtent } from 'axis'
import { fittedPlot } from 'charts'
import { count, escaped, number } from 'formats'
import { still } from 'dom_updates'
import { apart, stepAxis } from 'heatmap'

const [FEW, MANY] = [10, 20] // layers that are drawn as lines, and on a whole screen; from the eleventh on, dashed
const LINE = 14 // pixels of a row, or of a line's name
const ROWS = 48 // of a heat map that have a line each
const CHARACTER = 6.6 // pixels
const PLAIN = { paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)' }

/** @typedef {{steps: number[], layers: string[], norms: (number|string|null)[][]}} LayerNorms */

/** What Plotly can put on a logarithmic axis; inf and NaN are gaps. @param {number|string|null} norm */
const drawable = (norm) => (typeof norm === 'number' && norm > 0 ? norm : null)

/** Infinity or NaN, which are texts in JSON. @param {number|string|null} norm */
const isOdd = (norm) => typeof norm === 'string'

/**
 * Names as they fit next to a plot: without the parts that all begin with, then with initials of their first parts.
 * @param {string[]} names
 * @param {number} pixels
 */
const fitted = (names, pixels) => {
  const most = Math.max(Math.floor(pixels / CHARACTER), 4)
  const isLong = (parts) => parts.join('.').length > most
  const all = names.map((name) => name.split('.'))
  const isShared = () => all.every((parts) => parts.length > 1 && parts[0] === all[0][0])
  while (all.some(isLong) && isShared()) all.forEach((parts) => parts.shift())
  return all.map((parts) => {
    for (let i = 0; i < parts.length - 1 && isLong(parts); i++)
      if (!/^\d+$/.test(parts[i])) parts[i] = parts[i].slice(0, 1)
    return isLong(parts) ? `…${parts.join('.').slice(1 - most)}` : parts.join('.')
  })
}

/** Names of lines or rows, which take a third of a plot at most. @param {string[]} names @param {number} width */
const labelsOf = (names, width) => {
  const labels = fitted(names, width / 3)
  return { labels, room: Math.ceil(CHARACTER * Math.max(...labels.map((label) => label.length))) + 12 }
}

/**
 * Layers that are drawn as lines, from the largest norm over all steps to the smallest: all, or one half from either
 * end. Those that were infinite or NaN most often come first. forward: that must be among them.
 * @param {LayerNorms} found
 * @param {number} most
 * @param {string} [forward]
 * @returns {number[]}
 */
export const chosenLayers = ({ layers, norms }, most, forward) => {
  const odd = norms.map((row) => row.filter(isOdd).length)
  const sizes = norms.map((row) => {
    const logs = row.map(drawable).flatMap((norm) => (norm === null ? [] : [Math.log(norm)]))
    return logs.length ? logs.reduce((a, b) => a + b) / logs.length : -Number.MAX_VALUE
  })
  const ranked = layers.map((_, i) => i).sort((a, b) => odd[b] - odd[a] || sizes[b] - sizes[a] || a - b)
  const chosen = ranked.length <= most ? ranked : [...ranked.slice(0, most / 2), ...ranked.slice(-most / 2)]
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
  const lineCount = height < 2 * MANY * LINE ? FEW : MANY
  const lines = chosenLayers({ steps, layers, norms }, lineCount, forward).map((layer, i) => ({
    layer,
    color: colors[`run${i % FEW}`],
    dash: i < FEW ? 'solid' : 'dash',
    y: norms[layer].map(drawable),
    odd: steps.filter((_, j) => isOdd(norms[layer][j])),
  }))
  const isForward = lines.some(({ layer }) => layers[layer] === forward)
  const [least, most] = positiveExtent(lines.flatMap(({ y }) => y))
  const [low, high] = least <= most ? [Math.log10(least) - 0.1, Math.log10(most) + 0.1] : [0, 1]
  const axis = { ...logAxis([], [low, high]), range: [low, high], autorange: false }
  const { labels, room } = labelsOf(layers, width)
  const margin = { l: 46, r: room, t: 8, b: 24 }
  const pixels = Math.max(height - margin.t - margin.b, 20)
  const named = lines
    .map((line) => ({ ...line, last: norms[line.layer].findLast((norm) => isOdd(norm) || drawable(norm)) }))
    .filter(({ last }) => last)
    .map((line) => ({
      ...line,
      place: isOdd(line.last ?? 0) ? 0 : (pixels * (high - Math.log10(Number(line.last)))) / (high - low),
    }))
    .sort((a, b) => a.place - b.place)
  const places = apart(
    named.map(({ place }) => place),
    LINE,
    pixels - 4,
  )
  return {
    data: lines.flatMap(({ layer, color, dash, y, odd }) => {
      const opacity = isForward && layers[layer] !== forward ? 0.25 : 1
      const line = {
        x: steps,
        y,
        name: escaped(layers[layer]),
        type: 'scatter',
        mode: steps.length > 1 ? 'lines' : 'markers',
        opacity,
        line: { color, dash, width: layers[layer] === forward ? 3 : 1.6 },
        marker: { color, size: 6 },
        text: norms[layer].map((norm) => number(norm)),
        hovertemplate: `${escaped(layers[layer])}, step %{x}: %{text}<extra></extra>`,
      }
      if (!odd.length) return [line]
      return [
        line,
        {
          ...line,
          x: odd,
          y: odd.map(() => 10 ** high),
          text: odd.map((step) => number(norms[layer][steps.indexOf(step)])),
          mode: 'markers',
          marker: { color, size: 9, symbol: 'triangle-up' },
          cliponaxis: false,
        },
      ]
    }),
    lineCount: lines.length,
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
        text: escaped(labels[layer]),
        hovertext: escaped(layers[layer]),
        font: { color },
      })),
      xaxis: {
        ...stepAxis(steps, width - margin.l - margin.r),
        ...(steps.length > 1 && { range: [steps[0], steps[steps.length - 1]] }),
      },
      yaxis: { ...axis, gridcolor: colors.grid, zeroline: false, fixedrange: true },
    },
    drawn: steps.length,
  }
}

/**
 * A heat map of rows by step, whose cells are read in the head of its panel. odd: 1 in cells that are not finite.
 * @param {{
 *   steps: number[],
 *   rows: string[],
 *   z: (number|null)[][],
 *   odd?: (number|null)[][],
 *   words: string[][],
 *   height: number,
 *   width: number,
 *   more?: any
 * }} wanted
 * @param {Record<string, string>} colors
 */
export const rowsFigure = ({ steps, rows, z, odd, words, height, width, more }, colors) => {
  const { labels, room } = labelsOf(rows, width)
  const every = Math.ceil((LINE * rows.length) / Math.max(height, LINE * Math.min(rows.length, ROWS)))
  const named = rows.map((_, i) => i).filter((i) => i % every === 0)
  const cells = {
    type: 'heatmap',
    x: steps,
    y: rows.map((_, i) => i),
    hoverongaps: false,
    showscale: false,
    hoverinfo: 'none',
    customdata: words,
  }
  const oddColors = [0, 1].map((end) => [end, colors.skip])
  return {
    data: [
      { ...cells, z, ...more(colors) },
      ...(odd ? [{ ...cells, z: odd, zmin: 0, zmax: 1, colorscale: oddColors }] : []),
    ],
    layout: {
      height,
      margin: { l: room, r: 24, t: 8, b: 24 },
      ...PLAIN,
      dragmode: false,
      font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
      uirevision: 'same',
      xaxis: stepAxis(steps, width - room - 24),
      yaxis: {
        autorange: 'reversed',
        tickvals: named,
        ticktext: named.map((i) => escaped(labels[i])),
        showgrid: false,
        zeroline: false,
        fixedrange: true,
      },
    },
    drawn: steps.length,
  }
}

/** @param {Found} panel @param {string} part where it is drawn */
export const createRowsMap = (panel, part) => {
  const head = panel.querySelector('[data-pointed]')
  const usual = head.textContent
  const plot = fittedPlot(panel.querySelector(part), rowsFigure, {
    plotly_hover: ({ points: [{ customdata }] }) => {
      head.textContent = customdata
    },
    plotly_unhover: () => {
      head.textContent = usual
    },
  })
  return {
    /** @param {Omit<Parameters<typeof rowsFigure>[0], 'height'|'width'>} wanted */
    draw: (wanted) => {
      still(() => {
        const height = LINE * Math.min(wanted.rows.length, ROWS) + 32
        panel.style.setProperty('--height', `${Math.max(height, 170)}px`)
      })
      plot.draw(wanted)
    },
  }
}

/** @param {HTMLElement} section @param {string} api address of the run */
export const createLayers = (section, api) => {
  const page = /** @type {Found} */ (section.closest('[data-panel]'))
  const shown = /** @type {Found} */ (section.querySelector('[data-shown]'))
  const plot = fittedPlot(/** @type {Found} */ (section.querySelector('[data-layers-plot]')), (wanted, colors) => {
    const figure = layersFigure(wanted, colors)
    const half = figure.lineCount / 2
    shown.hidden = figure.lineCount === wanted.layers.length
    shown.querySelector('a').textContent = `the ${half} largest and ${half} smallest of ${wanted.layers.length} layers`
    return figure
  })
  const map = createRowsMap(page.querySelector('#layer-map'), '[data-map-plot]')
  const ends = page.querySelectorAll('#layer-map .ramp span')
  const oddKeys = page.querySelectorAll('[data-odd]')
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
    for (const key of oddKeys) key.hidden = !norms.flat().some(isOdd)
    positiveExtent(norms.flat().map(drawable)).forEach((norm, i) => {
      ends[i].textContent = number(norm)
    })
    map.draw({
      steps,
      rows: layers,
      z: norms.map((row) => row.map(drawable).map((norm) => norm && Math.log10(norm))),
      odd: norms.map((row) => row.map((norm) => (isOdd(norm) ? 1 : null))),
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
