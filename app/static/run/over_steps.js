// What a run logged under one name over its steps: histograms as a heat map, texts next to each other.
import { fittedPlot } from 'charts'
import { count, number, percent } from 'formats'
import { BINS, rebinned } from 'media_steps'

/** @typedef {import('media_steps').Histogram} Histogram */

/** @param {{steps: number[], histograms: Histogram[], height: number}} wanted @param {Record<string, string>} colors */
export const histogramsFigure = ({ steps, histograms, height }, colors) => {
  const { low, width, counts } = rebinned(histograms)
  const totals = counts.map((bins) => bins.reduce((a, b) => a + b, 0) || 1)
  const shares = Array.from({ length: BINS }, (_, bin) => counts.map((bins, i) => (bins[bin] ? bins[bin] / totals[i] : null)))
  return {
    data: [{
      type: 'heatmap', x: steps, y: shares.map((_, bin) => low + (bin + 0.5) * width), z: shares, zmin: 0, colorscale: [[0, colors.card], [1, colors.loss]], hoverongaps: false,
      text: shares.map((row, bin) => row.map((share) => `${number(low + (bin + 0.5) * width)}: ${percent(share)}`)), hovertemplate: 'step %{x}, %{text}<extra></extra>', colorbar: { thickness: 10, outlinewidth: 0, tickformat: '.0%', title: { text: 'fraction of values', side: 'right' } },
    }],
    layout: {
      height, margin: { l: 62, r: 14, t: 10, b: 48 }, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
      hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
      xaxis: { title: { text: 'step', standoff: 6 }, nticks: 10, tickformat: ',d', showgrid: false, zeroline: false }, yaxis: { title: { text: 'value' }, showgrid: false, zeroline: false, nticks: 6 },
    },
    drawn: steps.length,
  }
}

/** @param {string} name @param {Found} box */
const createHeatmap = (name, box) => {
  const plot = /** @type {any} */ (Object.assign(document.createElement('div'), { className: 'plot', role: 'img' }))
  plot.setAttribute('aria-label', `Histograms ${name} by step`)
  box.prepend(plot)
  const figure = fittedPlot(plot, histogramsFigure)
  /** By address. @type {Map<string, Promise<Histogram|null>>} */
  const files = new Map()
  /** @param {string} address @returns {Promise<Histogram|null>} */
  const read = async (address) => {
    const answer = await fetch(address).catch(() => null)
    const histogram = answer?.ok ? await answer.json().catch(() => null) : null
    return Array.isArray(histogram?.counts) && histogram.counts.length && histogram.lowest <= histogram.highest ? histogram : null
  }
  let newest = 0
  return async (entries) => {
    const number = ++newest
    for (const { address } of entries) if (!files.has(address)) files.set(address, read(address))
    const histograms = await Promise.all(entries.map(({ address }) => files.get(address)))
    const there = entries.map(({ step }, i) => ({ step, histogram: histograms[i] })).filter(({ histogram }) => histogram)
    if (number === newest && there.length) figure.draw({ steps: there.map(({ step }) => step), histograms: there.map(({ histogram }) => histogram) })
  }
}

/** @param {string} name @param {Found} box @param {(root: ParentNode) => void} preview */
const createTexts = (name, box, preview) => {
  const list = Object.assign(document.createElement('div'), { className: 'text-steps', tabIndex: 0 })
  list.setAttribute('role', 'region')
  list.setAttribute('aria-label', `${name} by step`)
  box.prepend(list)
  let there = 0
  return (entries) => {
    for (const { step, address } of entries.slice(there)) {
      const text = /** @type {any} */ (Object.assign(document.createElement('pre'), { textContent: '…', tabIndex: 0 }))
      text.dataset.preview = address
      text.setAttribute('role', 'region')
      text.setAttribute('aria-label', `${name}, step ${count(step)}`)
      const title = Object.assign(document.createElement('b'), { textContent: `step ${count(step)}` })
      const column = document.createElement('div')
      column.append(title, text)
      list.append(column)
    }
    there = entries.length
    preview(list)
  }
}

/** @param {Found} box @param {(root: ParentNode) => void} preview */
export const createOverSteps = (box, preview) => {
  const grid = box.querySelector('[data-grid]')
  /** @type {Map<string, {show: (entries: {step: number, address: string}[]) => unknown, caption: Element}>} */
  const cards = new Map()
  return {
    /** @param {Map<string, {step: number, address: string}[]>} byName in order of steps */
    refresh: (byName) => {
      for (const [name, entries] of byName) {
        const isText = name.endsWith('.txt')
        if (entries.length < 2 || !(isText || name.endsWith('.histogram.json'))) continue
        let card = cards.get(name)
        if (!card) {
          const figure = /** @type {any} */ (Object.assign(document.createElement('figure'), { className: 'artifact' }))
          const caption = figure.appendChild(document.createElement('figcaption'))
          grid.append(figure)
          card = { show: isText ? createTexts(name, figure, preview) : createHeatmap(name, figure), caption }
          cards.set(name, card)
        }
        card.caption.textContent = `${name} · ${entries.length} steps`
        card.show(entries)
      }
      box.hidden = !cards.size
    },
  }
}
