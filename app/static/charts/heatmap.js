// The heat map of gradients' exponents in Plotly's format. Draws nothing itself.
import { power } from 'formats'

/** fp16: subnormal from 2^-24, normal from 2^-14, and 65504 is just under 2^16. */
const [SMALLEST, NORMAL, END] = [-24, -14, 16]
const RAREST = -6 // log10 of the share that gets the faintest colour

/**
 * @typedef {{
 *   step: number,
 *   scale: number,
 *   lowest_exponent: number,
 *   counts: number[],
 *   zeros: number,
 *   nonfinite: number
 * }} Sample
 * counts: gradients in [2^e, 2^(e+1)), unscaled, from the lowest exponent e on
 */

/**
 * Shares, of gradients that are not zero, that a scale loses.
 * @param {Sample} sample
 * @param {number|null} log2scale null: its own
 */
export const lostAt = (sample, log2scale) => {
  const shift = log2scale ?? Math.log2(sample.scale)
  const sum = (isCounted) =>
    sample.counts.reduce((total, count, i) => total + (isCounted(sample.lowest_exponent + i + shift) ? count : 0), 0)
  const total = Math.max(
    sum(() => true),
    1,
  )
  return { underflow: sum((e) => e < SMALLEST) / total, nearOverflow: sum((e) => e >= END - 2) / total }
}

/** The share of a sample's gradients, but zeros, in [2^e, 2^(e+1)). @param {Sample} sample @param {number} exponent */
export const shareAt = ({ counts, lowest_exponent: lowest }, exponent) =>
  (counts[exponent - lowest] ?? 0) /
  Math.max(
    counts.reduce((a, b) => a + b, 0),
    1,
  )

/**
 * Places of labels from the top down, none closer than a line.
 * @param {number[]} places in pixels, ascending
 * @param {number} [least]
 * @param {number} [end] the last one is not below it
 */
export const apart = (places, least = 13, end = Infinity) => {
  const moved = [...places]
  for (let i = 1; i < moved.length; i++) moved[i] = Math.max(moved[i], moved[i - 1] + least)
  for (let i = moved.length - 1, most = end; i >= 0; i--, most -= least) moved[i] = Math.min(moved[i], most)
  return moved
}

/**
 * An axis of the steps at which something was measured. Few steps have a tick for each, not the same one repeatedly.
 * @param {number[]} steps in order
 * @param {number} pixels
 */
export const stepAxis = (steps, pixels) => ({
  showgrid: false,
  zeroline: false,
  fixedrange: true,
  tickformat: ',d',
  ...(steps[steps.length - 1] - steps[0] < 8
    ? { tick0: steps[0], dtick: 1 }
    : { nticks: Math.min(Math.ceil(pixels / 60), 8) }),
})

/** A color with an opacity. @param {string} color rgb(…) @param {number} opacity */
const faint = (color, opacity) => color.replace('rgb(', 'rgba(').replace(')', `, ${opacity})`)

const MARGIN = { l: 46, r: 96, t: 6, b: 24 }
const LINE = 26 // pixels of a label of two lines

/**
 * @param {{samples: Sample[], log2scale: number|null, height: number, width: number}} wanted
 * @param {Record<string, string>} colors
 */
export const heatFigure = ({ samples, log2scale, height, width }, colors) => {
  const filled = samples.filter(({ counts }) => counts.length)
  const steps = samples.map(({ step }) => step)
  const shifts = samples.map(({ scale }) => log2scale ?? Math.log2(scale))
  const lowest = Math.min(...filled.map((each) => each.lowest_exponent), ...shifts.map((shift) => SMALLEST - shift - 2))
  const highest = Math.max(
    ...filled.map((each) => each.lowest_exponent + each.counts.length),
    ...shifts.map((shift) => END - shift + 2),
  )
  const exponents = Array.from({ length: Math.ceil(highest) - Math.floor(lowest) }, (_, i) => Math.floor(lowest) + i)
  const heat = {
    type: 'heatmap',
    x: steps,
    y: exponents.map((e) => e + 0.5),
    z: exponents.map((e) => samples.map((each) => (shareAt(each, e) ? Math.log10(shareAt(each, e)) : null))),
    zmin: RAREST,
    zmax: 0,
    colorscale: [
      [0, colors.card],
      [1, colors.loss],
    ],
    hoverongaps: true,
    showscale: false,
    hoverinfo: 'none',
    customdata: exponents.map((e) => samples.map((_, i) => [i, e])),
  }
  // It ends with the last step: half a cell later there was no training yet.
  const range =
    steps.length > 1
      ? [steps[0] - (steps[1] - steps[0]) / 2, steps[steps.length - 1]]
      : [steps[0] - 0.5, steps[0] + 0.5]
  const [x, of] = [[range[0], ...steps, range[1]], (values) => [values[0], ...values, values[values.length - 1]]]
  const limit = (name, exponent, color, more = {}) => ({
    x,
    y: of(shifts.map((shift) => exponent - shift)),
    name,
    type: 'scatter',
    mode: 'lines',
    hoverinfo: 'skip',
    line: { color, width: 1.6, dash: more.dash, shape: 'hvh' },
    ...more.fill,
  })
  const edge = (y) => ({ x: range, y: [y, y], type: 'scatter', mode: 'lines', hoverinfo: 'skip', line: { width: 0 } })
  const filling = (color) => ({ fill: 'tonexty', fillcolor: faint(color, 0.1) })
  const data = [
    heat,
    edge(highest),
    limit('overflow', END, colors.skip, { fill: filling(colors.skip) }),
    limit('subnormal', NORMAL, colors.scale, { dash: 'dash' }),
    edge(lowest),
    limit('becomes 0', SMALLEST, colors.scale, { fill: filling(colors.scale) }),
  ]
  const pixels = Math.max(height - MARGIN.t - MARGIN.b, 20)
  const shift = shifts[shifts.length - 1]
  /** @type {[string, string, number, string][]} */
  const limits = [
    ['Overflow', '65,504', END, colors.skip],
    ['Subnormal', `below ${power(NORMAL)}`, NORMAL, colors.scale],
    ['Becomes 0', `below ${power(SMALLEST)}`, SMALLEST, colors.scale],
  ]
  const places = apart(
    limits.map(([, , e]) => (pixels * (highest - e + shift)) / (highest - lowest)),
    LINE,
    pixels - LINE / 2,
  )
  const layout = {
    margin: MARGIN,
    height,
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    showlegend: false,
    dragmode: false,
    font: { family: 'system-ui, sans-serif', size: 11, color: colors.quiet },
    uirevision: 'same',
    annotations: limits.map(([title, below, , color], i) => ({
      x: 1,
      xref: 'paper',
      xanchor: 'left',
      xshift: 6,
      y: 1,
      yref: 'paper',
      yanchor: 'middle',
      yshift: -places[i],
      align: 'left',
      showarrow: false,
      text: `<b style="color: ${color}">${title}</b><br>${below}`,
    })),
    xaxis: { ...stepAxis(steps, width - MARGIN.l - MARGIN.r), range },
    yaxis: {
      gridcolor: colors.grid,
      zeroline: false,
      tickprefix: '2<sup>',
      ticksuffix: '</sup>',
      dtick: 8,
      range: [lowest, highest],
      fixedrange: true,
    },
  }
  return { data, layout, drawn: samples.length }
}
