// The mean of several lines, and how far they lie apart. Draws nothing itself.
import { position } from 'points'

const GRID = 400 // places along x, if the lines have more of their own

/** @typedef {{x: number[], y: (number|null)[]}} Line */

/**
 * Where a line stands at x, between its points; null before, beyond, and in a gap.
 * @param {Line} line
 * @param {number} at
 */
const valueAt = ({ x, y }, at) => {
  const i = position(x, at)
  if (x[i] === at) return y[i]
  const [before, after] = [y[i - 1], y[i]]
  if (!i || i === x.length || before === null || after === null) return null
  return before + ((after - before) * (at - x[i - 1])) / (x[i] - x[i - 1])
}

/** @param {number} number of runs */
export const meanOf = (number) => (number === 1 ? '1 run' : `mean of ${number} runs`)

/** @param {Line[]} lines @returns {number[]} */
const placesOf = (lines) => {
  const own = [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => a - b)
  if (own.length <= GRID) return own
  const [low, high] = [own[0], own.at(-1)]
  return Array.from({ length: GRID }, (_, i) => low + ((high - low) * i) / (GRID - 1))
}

/**
 * The mean of those lines that have a value there; low and high: the lowest and the highest of
 * them, or one standard deviation of a sample, n − 1, below and above the mean.
 * @param {Line[]} lines each in order of x @param {'range'|'deviation'} kind
 */
export const banded = (lines, kind) => {
  /** @type {Record<'x'|'mean'|'low'|'high', number[]>} */
  const found = { x: [], mean: [], low: [], high: [] }
  for (const at of placesOf(lines)) {
    const values = lines.map((line) => valueAt(line, at)).filter((value) => value !== null)
    if (!values.length) continue
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0)
    const deviation = Math.sqrt(squares / Math.max(values.length - 1, 1))
    found.x.push(at)
    found.mean.push(mean)
    found.low.push(kind === 'range' ? Math.min(...values) : mean - deviation)
    found.high.push(kind === 'range' ? Math.max(...values) : mean + deviation)
  }
  return found
}
