// What a screen can show of lines and ticks: no more points than pixels, and every extreme.
import { position } from 'points'

/**
 * @typedef {{range: [number, number], pixels: number}} Screen a stretch of the x axis, and how wide it is drawn
 * @typedef {{x: number, count: number, first: number, last: number, value?: string|null}} Tick what happened within a
 *   pixel, first and last at these steps
 */

/**
 * The lowest and the highest of every column of two to four pixels, in their order, and where a
 * step line leaves it. Edges of columns are multiples of a power of two, so they do not move
 * while a run grows. Always new arrays: Plotly compares them by identity.
 * @param {import('points').Line} line @param {Screen} screen @returns {import('points').Line}
 */
export const folded = ({ x, y }, { range: [low, high], pixels }) => {
  const span = high - low
  const begin = Math.max(position(x, low - span / 2) - 1, 0) // half a screen more, for dragging
  const end = Math.min(position(x, high + span / 2) + 1, x.length)
  if (end - begin <= pixels) return { x: x.slice(begin, end), y: y.slice(begin, end) }
  const column = 2 ** Math.ceil(Math.log2((2 * span) / pixels || 1))
  /** @type {import('points').Line} */
  const kept = { x: [], y: [] }
  const keep = (i) => {
    kept.x.push(x[i])
    kept.y.push(y[i])
  }
  for (let i = begin; i < end;) {
    const next = (Math.floor(x[i] / column) + 1) * column
    let [lowest, highest, last] = [i, i, i]
    for (; i < end && x[i] < next; i++) {
      const [value, least, most] = [y[i], y[lowest], y[highest]]
      if (value === null) continue
      if (least === null || value < least) lowest = i
      if (most === null || value > most) highest = i
      last = i
    }
    keep(Math.min(lowest, highest))
    if (lowest !== highest) keep(Math.max(lowest, highest))
    if (y[last] !== kept.y.at(-1)) keep(last)
  }
  if (kept.x.at(-1) !== x[end - 1]) keep(end - 1)
  return kept
}

/**
 * Ticks that are a pixel apart or more; closer ones of the same value are one tick, with their number.
 * @param {import('points').Ticks & {values?: (string|null)[]}} ticks
 * @param {number[]} at where they stand
 * @param {Screen} screen
 * @returns {Tick[]}
 */
export const merged = ({ steps, counts, values }, at, { range: [low, high], pixels }) => {
  const pixel = (high - low) / pixels
  /** @type {Tick[]} */
  const ticks = []
  /** The last tick of each value. @type {Map<string|null|undefined, Tick>} */
  const latest = new Map()
  for (let i = position(at, low); i < at.length && at[i] <= high; i++) {
    const value = values?.[i]
    const tick = latest.get(value)
    if (tick && at[i] - tick.x < pixel) {
      tick.count += counts[i]
      tick.last = steps[i]
    } else {
      const made = { x: at[i], count: counts[i], first: steps[i], last: steps[i], ...(values && { value }) }
      latest.set(value, made)
      ticks.push(made)
    }
  }
  return ticks
}

const PAUSE = 5 // usual distances without a sample that are a pause

/**
 * Times with one more in each pause, where a line is to break, and the indexes of their values; -1: of none.
 * @param {number[]} times
 * @returns {{times: number[], places: number[]}}
 */
export const withPauses = (times) => {
  const distances = times.slice(1).map((time, i) => time - times[i])
  const longest = PAUSE * ([...distances].sort((a, b) => a - b)[Math.floor(distances.length / 2)] ?? Infinity)
  const parts = times
    .map((time, i) =>
      i && distances[i - 1] > longest
        ? [
            [(times[i - 1] + time) / 2, -1],
            [time, i],
          ]
        : [[time, i]],
    )
    .flat()
  return { times: parts.map(([time]) => time), places: parts.map(([, place]) => place) }
}
