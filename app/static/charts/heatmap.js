// The heat map of gradients' exponents, as Plotly wants it. Draws nothing itself.
import { percent, power } from 'formats'

/** fp16: subnormal from 2^-24, normal from 2^-14, and 65504 is just under 2^16. */
const [SMALLEST, NORMAL, END] = [-24, -14, 16]
const RAREST = -6 // log10 of the share that gets the faintest colour

/**
 * @typedef {{step: number, scale: number, lowest_exponent: number, counts: number[], zeros: number, nonfinite: number}} Sample
 * counts: gradients in [2^e, 2^(e+1)), unscaled, from the lowest exponent e on
 */

/** Shares, of gradients that are not zero, that a scale loses. @param {Sample} sample @param {number|null} log2scale null: its own */
export const lostAt = (sample, log2scale) => {
  const shift = log2scale ?? Math.log2(sample.scale)
  const sum = (isCounted) => sample.counts.reduce((total, count, i) => total + (isCounted(sample.lowest_exponent + i + shift) ? count : 0), 0)
  const total = Math.max(sum(() => true), 1)
  return { underflow: sum((e) => e < SMALLEST) / total, nearOverflow: sum((e) => e >= END - 2) / total }
}

/** @param {{samples: Sample[], log2scale: number|null}} wanted @param {Record<string, string>} colors */
export const heatFigure = ({ samples, log2scale }, colors) => {
  const filled = samples.filter(({ counts }) => counts.length)
  const steps = samples.map(({ step }) => step)
  const shifts = samples.map(({ scale }) => log2scale ?? Math.log2(scale))
  const lowest = Math.min(...filled.map((each) => each.lowest_exponent), ...shifts.map((shift) => SMALLEST - shift - 1))
  const highest = Math.max(...filled.map((each) => each.lowest_exponent + each.counts.length), ...shifts.map((shift) => END - shift + 1))
  const exponents = Array.from({ length: Math.ceil(highest) - Math.floor(lowest) }, (_, i) => Math.floor(lowest) + i)
  const totals = samples.map(({ counts }) => counts.reduce((a, b) => a + b, 0))
  const shares = exponents.map((e) => samples.map((each, i) => (each.counts[e - each.lowest_exponent] ?? 0) / (totals[i] || 1)))
  const heat = {
    type: 'heatmap', x: steps, y: exponents.map((e) => e + 0.5), z: shares.map((row) => row.map((share) => (share ? Math.log10(share) : null))),
    zmin: RAREST, zmax: 0, colorscale: [[0, colors.card], [1, colors.loss]], hoverongaps: false,
    customdata: shares.map((row, i) => row.map((share) => [power(exponents[i]), percent(share)])),
    hovertemplate: 'step %{x}: %{customdata[1]} of gradients at %{customdata[0]}<extra></extra>',
    colorbar: { title: { text: 'fraction of gradients', side: 'right' }, thickness: 10, tickvals: [-6, -4, -2, 0], ticktext: ['10<sup>−4</sup> %', '0.01 %', '1 %', '100 %'], outlinewidth: 0 },
  }
  const limit = (name, exponent, color, dash) => ({
    x: steps, y: shifts.map((shift) => exponent - shift), name, type: 'scatter', mode: 'lines', hoverinfo: 'skip',
    line: { color, width: 2, dash, shape: 'hvh' },
  })
  const data = [
    heat,
    limit('overflow, 65504', END, colors.skip, 'solid'),
    limit('a factor of four below', END - 2, colors.skip, 'dot'),
    limit('smallest normal number', NORMAL, colors.scale, 'dot'),
    limit('smallest subnormal: below it, 0', SMALLEST, colors.scale, 'solid'),
  ]
  const layout = {
    margin: { l: 62, r: 14, t: 30, b: 42 }, height: 420, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12, color: colors.quiet }, uirevision: 'same',
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.edge, font: { color: colors.text } },
    legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: { color: colors.text } },
    xaxis: { title: { text: 'attempted step', standoff: 6 }, gridcolor: colors.grid, zeroline: false, ...(steps.length > 1 && { range: [steps[0], steps.at(-1)] }) },
    yaxis: { title: { text: 'gradient magnitude (unscaled)' }, gridcolor: colors.grid, zeroline: false, tickprefix: '2<sup>', ticksuffix: '</sup>', dtick: 8, range: [lowest, highest] },
  }
  return { data, layout, drawn: samples.length }
}
