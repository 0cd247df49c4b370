// One vertical line through all panels that share x, with the step on its flag; the values at that
// step are in the panels' legends.
import { number, place as placeText } from 'formats'
import { METRIC, position } from 'points'

const LABELS = { step: 'step', applied: 'applied', time: 'seconds' }

/**
 * nonfinite: its values that cannot be drawn, and where they stand.
 * @typedef {{
 *   name: string,
 *   color: string,
 *   x: number[],
 *   y: (number|null)[],
 *   nonfinite?: {x: number[], values: (string|null)[]},
 *   words?: (y: number) => string
 * }} Line a line as it is drawn
 */
/**
 * @typedef {{
 *   lines: Line[],
 *   marks: {name: string, x: number[], text: string[]}[],
 *   axis: {range: [number, number], left: number, pixels: number}
 * }} Drawn
 */

/** @param {number[]} xs @param {number} x @returns {number} index of the nearest */
const nearest = (xs, x) => {
  const i = position(xs, x)
  if (i === 0) return 0
  return i < xs.length && xs[i] - x < x - xs[i - 1] ? i : i - 1
}

/** Index of the last one at x or before; -1: there is none. @param {number[]} xs @param {number} x */
const lastUntil = (xs, x) => {
  const i = position(xs, x)
  return xs[i] === x ? i : i - 1
}

/**
 * The last value of a line at x or before.
 * @param {Line} line
 * @param {number|null} x null: at its end
 * @param {number} [digits]
 */
export const valueAt = ({ x: xs, y, words, nonfinite }, x, digits) => {
  const at = x ?? Infinity
  const i = lastUntil(xs, at)
  const value = y[i] ?? null
  const j = nonfinite ? lastUntil(nonfinite.x, at) : -1
  if (nonfinite && j >= 0) {
    const [own, other] = [xs[i] ?? -Infinity, nonfinite.x[j]]
    if (other > own || (other === own && value === null))
      return nonfinite.values[j] === null ? 'not finite' : number(nonfinite.values[j])
  }
  if (value === null) return '–'
  return words ? words(value) : number(value, digits)
}

/**
 * Return the position of a pointer on the x axis; null: outside of the plot.
 * @param {MouseEvent} event
 * @param {Found} plot
 * @param {Drawn} drawn
 */
export const pointedAt = (
  { clientX },
  plot,
  {
    axis: {
      range: [low, high],
      left,
      pixels,
    },
  },
) => {
  const at = clientX - plot.getBoundingClientRect().left - left
  return at < 0 || at > pixels ? null : low + (at / pixels) * (high - low)
}

/** The place that a pointer means: the nearest one of a line. @param {Drawn} drawn @param {number} x */
export const snapped = ({ lines }, x) => {
  const first = lines.find(({ x: xs }) => xs.length)
  return first ? first.x[nearest(first.x, x)] : x
}

/**
 * Return the texts of marks at a position: at their own step, or at the nearest pixel.
 * @param {Drawn} drawn
 * @param {number} x
 * @param {string} mode
 */
const flagOf = (
  {
    marks,
    axis: {
      range: [low, high],
      pixels,
    },
  },
  x,
  mode,
) => {
  const happened = marks.flatMap(({ name, x: xs, text }) => {
    const i = xs.length ? nearest(xs, x) : -1
    return i >= 0 && Math.abs(xs[i] - x) <= (high - low) / pixels
      ? [name === 'skipped' ? `skipped: ${text[i]}` : text[i]]
      : []
  })
  const label = `${LABELS[mode] ?? mode.slice(METRIC.length)} ${placeText(x)}`
  return { text: [label, ...happened].join(' · '), isMarked: happened.length > 0 }
}

/**
 * Show the line of a panel at a place, or hide it.
 * @param {HTMLElement} line
 * @param {Drawn|null} drawn
 * @param {number|null} x
 * @param {string} mode
 */
export const place = (line, drawn, x, mode) => {
  const [low, high] = drawn?.axis.range ?? [0, 0]
  line.hidden = !drawn || x === null || x < low || x > high || low === high
  if (line.hidden || !drawn || x === null) return
  const { left, pixels } = drawn.axis
  const at = left + ((x - low) / (high - low)) * pixels
  line.style.transform = `translateX(${at}px)`
  const flag = line.querySelector('b')
  if (!flag) return
  const { text, isMarked } = flagOf(drawn, x, mode)
  flag.textContent = text
  flag.classList.toggle('marked', isMarked)
  flag.classList.toggle('before', at > left + pixels / 2)
}
