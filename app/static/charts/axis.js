// Labels of axes.
import { count } from 'formats'

const LABEL = 90 // pixels that a label has

/** Multiples of 1, 2 or 5 times a power of ten, whole ones of steps. @param {[number, number]} range @param {number} pixels @param {boolean} isWhole @returns {number[]} */
export const ticksOf = ([low, high], pixels, isWhole) => {
  const least = (high - low) / Math.max(pixels / LABEL, 1)
  if (!(least > 0) || !Number.isFinite(least)) return []
  const power = 10 ** Math.floor(Math.log10(least))
  const every = [1, 2, 5].map((n) => n * power).find((n) => n >= least * 0.999) ?? 10 * power
  const step = isWhole ? Math.max(1, Math.round(every)) : every
  const ticks = []
  for (let n = Math.ceil(low / step); n * step <= high; n++) ticks.push(n * step)
  return ticks
}

/** @param {number} x */
export const tickText = (x) => (Number.isInteger(x) ? count(x) : String(Number(x.toPrecision(6))))

/** What lies between two labels of a logarithmic axis: some decades, or 1, 2, 5. @param {number[]} values @returns {number|string} */
export const between = (values) => {
  const decades = Math.log10(values.reduce((a, b) => Math.max(a, b), 0) / values.reduce((a, b) => Math.min(a, b), Infinity))
  return decades < 2 ? 'D2' : Math.ceil(decades / 5) || 1
}
