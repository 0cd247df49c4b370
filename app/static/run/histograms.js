// Histograms that a run logged under one name: a heat map over its steps.
import { fittedPlot } from 'charts'
import { count, number, percent } from 'formats'
import { stepAxis } from 'heatmap'
import { BINS, rebinned } from 'media_steps'

/** @typedef {import('media_steps').Histogram} Histogram */

/**
 * @param {{steps: number[], histograms: Histogram[], step?: number, height: number}} wanted step: that the card is at
 * @param {Record<string, string>} colors
 */
export const histogramsFigure = ({ steps, histograms, step, height }, colors) => {
  const { low, width, counts } = rebinned(histograms)
  const totals = counts.map((bins) => bins.reduce((a, b) => a + b, 0) || 1)
  const shares = Array.from({ length: BINS }, (_, bin) =>
    counts.map((bins, i) => (bins[bin] ? bins[bin] / totals[i] : null)),
  )
  return {
    data: [
      {
        type: 'heatmap',
        x: steps,
        y: shares.map((_, bin) => low + (bin + 0.5) * width),
        z: shares.map((row) => row.map((share) => share && Math.log10(share))),
        zmin: -4,
        zmax: 0,
        colorscale: [
          [0, colors.card],
          [1, colors.loss],
        ],
        hoverongaps: false,
        hoverinfo: 'none',
        showscale: false,
        text: shares.map((row, bin) =>
          row.map((share, i) => `step ${count(steps[i])}, ${number(low + (bin + 0.5) * width)}: ${percent(share)}`),
        ),
      },
    ],
    layout: {
      height,
      margin: { l: 46, r: 13, t: 4, b: 22 },
      paper_bgcolor: 'rgba(0,0,0,0)',
      plot_bgcolor: colors.grid,
      font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
      dragmode: false,
      xaxis: stepAxis(steps, 360),
      yaxis: { showgrid: false, zeroline: false, nticks: 6, fixedrange: true },
      shapes:
        step === undefined
          ? []
          : [
              {
                type: 'line',
                x0: step,
                x1: step,
                yref: 'paper',
                y0: 0,
                y1: 1,
                line: { color: colors.text, width: 1.5, dash: 'dot' },
              },
            ],
    },
    drawn: steps.length,
  }
}

/** @param {import('media').MediaCard} card @returns {import('media').ShowMedia} */
export const createHistograms = ({ name, body, say, point }) => {
  const plot = /** @type {any} */ (Object.assign(document.createElement('div'), { className: 'plot', role: 'img' }))
  plot.setAttribute('aria-label', `Histograms ${name} by step`)
  body.replaceChildren(plot)
  const figure = fittedPlot(plot, histogramsFigure, {
    plotly_hover: ({ points: [{ text }] }) => point(text),
    plotly_unhover: () => point(''),
  })
  /** By address. @type {Map<string, Promise<Histogram|null>>} */
  const files = new Map()
  /** @param {string} address @returns {Promise<Histogram|null>} */
  const read = async (address) => {
    const answer = await fetch(address).catch(() => null)
    const histogram = answer?.ok ? await answer.json().catch(() => null) : null
    return Array.isArray(histogram?.counts) && histogram.counts.length && histogram.lowest <= histogram.highest
      ? histogram
      : null
  }
  let newest = 0
  return async (_, step, all) => {
    const turn = ++newest
    const stored = all.filter(({ address }) => address)
    for (const { address } of stored) if (!files.has(address)) files.set(address, read(address))
    const histograms = await Promise.all(stored.map(({ address }) => files.get(address)))
    const there = stored
      .map((file, i) => ({ step: file.step, histogram: histograms[i] }))
      .filter(({ histogram }) => histogram)
    if (turn !== newest || !there.length) return
    const nonfinite = there.find((each) => each.step === step)?.histogram?.nonfinite
    say(nonfinite ? `${count(nonfinite)} not finite` : `${there.length} ${there.length === 1 ? 'step' : 'steps'}`)
    figure.draw({ steps: there.map((each) => each.step), histograms: there.map(({ histogram }) => histogram), step })
  }
}
