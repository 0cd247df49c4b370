// Labels of axes.
import { count, number } from 'formats'

const LABEL = 90 // pixels that a label has
const LOG_LABELS = 5 // labels of a logarithmic axis
const SAME = 1e-9 // share by which values of a constant differ
const ROOM = 0.05 // share of an axis beyond its values
/**
 * A range without outliers: between these quantiles, widened by a share of their distance on either side, but not
 * beyond the extremes.
 */
const ROBUST = { low: 0.025, high: 0.975, wider: 0.12, least: 5 } // least: values

/**
 * Multiples of 1, 2 or 5 times a power of ten, whole ones of steps.
 * @param {[number, number]} range
 * @param {number} pixels
 * @param {boolean} isWhole
 * @returns {number[]}
 */
export const ticksOf = ([low, high], pixels, isWhole) => {
  const least = (high - low) / Math.max(pixels / LABEL, 1)
  if (!(least > 0) || !Number.isFinite(least)) return []
  const power = 10 ** Math.floor(Math.log10(least))
  const candidates = [0.5, 1, 2, 5, 10].map((n) => n * power)
  const usual = candidates.findIndex((every) => every >= least * 0.999)
  const ticks = multiplesIn([low, high], candidates[usual], isWhole)
  return ticks.length < 2 ? multiplesIn([low, high], candidates[usual - 1], isWhole) : ticks // in little room
}

/** @param {[number, number]} range @param {number} every @param {boolean} isWhole @returns {number[]} */
const multiplesIn = ([low, high], every, isWhole) => {
  const step = isWhole ? Math.max(1, Math.round(every)) : every
  const multiples = []
  for (let n = Math.ceil(low / step); n * step <= high; n++) multiples.push(n * step)
  return multiples
}

/** @param {number} x */
export const tickText = (x) => (Number.isInteger(x) ? count(x) : String(Number(x.toPrecision(6))))

/** @param {number} y */
const valueText = (y) => number(y, 6)

/**
 * Return the extent of the positive values; without any, from infinity to 0.
 * @param {(number|null)[]} values
 * @returns {[number, number]}
 */
export const positiveExtent = (values) => {
  let [low, high] = [Infinity, 0]
  for (const value of values) {
    if (value === null || value <= 0) continue
    low = Math.min(low, value)
    high = Math.max(high, value)
  }
  return [low, high]
}

/**
 * The range of y that ignores outliers of what is drawn in a stretch of x; undefined: there are none to ignore.
 * @param {{x: number[], y: (number|null)[]}[]} lines
 * @param {[number, number]} stretch
 * @param {boolean} isLog then the ends are exponents
 * @returns {[number, number]|undefined}
 */
export const robustRange = (lines, [first, last], isLog) => {
  /** @type {number[]} */
  const values = []
  for (const { x, y } of lines) {
    y.forEach((value, i) => {
      if (value !== null && x[i] >= first && x[i] <= last && !(isLog && value <= 0))
        values.push(isLog ? Math.log10(value) : value)
    })
  }
  const sorted = Float64Array.from(values).sort()
  const end = sorted.length - 1
  if (sorted.length < ROBUST.least) return undefined
  const [low, high] = [sorted[Math.ceil(ROBUST.low * end)], sorted[Math.floor(ROBUST.high * end)]]
  // Of a constant.
  const wider = ROBUST.wider * (high - low) || (isLog ? ROBUST.wider : ROBUST.wider * Math.abs(low) || 1)
  const [from, to] = [Math.max(sorted[0], low - wider), Math.min(sorted[end], high + wider)]
  const room = ROOM * (to - from)
  return from === sorted[0] && to === sorted[end] ? undefined : [from - room, to + room]
}

/**
 * Return the chosen y range of a panel: a fixed one, or one without outliers, which are then named.
 * @param {string} name
 * @param {import('url_state').View} view
 * @param {() => {x: number[], y: (number|null)[]}[]} linesOf as recorded
 * @param {[number, number]} stretch of x
 * @param {boolean} isLog
 */
export const chosenRange = (name, view, linesOf, stretch, isLog) => {
  const fixed = view.rows[name]
  if (fixed || !view.trimmed.includes(name)) return { zoom: fixed, outliers: '' }
  const lines = linesOf()
  const robust = robustRange(lines, stretch, isLog)
  const ends = (robust ?? []).map((end) => (isLog ? 10 ** end : end))
  const isBeyond = (is) =>
    lines.some(({ x, y }) =>
      y.some((value, i) => value !== null && x[i] >= stretch[0] && x[i] <= stretch[1] && is(value)),
    )
  const beyond = [
    ...(isBeyond((value) => value > ends[1]) ? [`above ${number(ends[1])}`] : []),
    ...(isBeyond((value) => value < ends[0] && !(isLog && value <= 0)) ? [`below ${number(ends[0])}`] : []),
  ]
  return { zoom: robust, outliers: beyond.length ? `values ${beyond.join(' and ')} not shown` : '' }
}

/**
 * Labels of a logarithmic axis, at least three between two values: powers of ten, 1, 2 and 5 of each, or as on a linear
 * axis.
 * @param {number} low
 * @param {number} high
 * @returns {number[]}
 */
export const logTicks = (low, high) => {
  if (!(low > 0 && low <= high)) return []
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))]
  const most = Math.max(1, Math.ceil((last - first) / LOG_LABELS))
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i)
  const candidates = [
    ...Array.from({ length: most }, (_, i) => powers.filter((power) => power % (most - i) === 0)).map((some) =>
      some.map((power) => 10 ** power),
    ),
    powers.flatMap((power) => [1, 2, 5].map((n) => Number(`${n}e${power}`))),
  ].map((ticks) => ticks.filter((tick) => tick >= low && tick <= high))
  return candidates.find((ticks) => ticks.length >= 3) ?? ticksOf([low, high], LOG_LABELS * LABEL, false)
}

/**
 * A linear axis that shows all values.
 * @param {(number|null)[]} values @param {[number, number]} [zoom] ends that a user has chosen
 * @param {{fromZero?: 'always'|'usually'|'constant', labels?: number}} [options] usually: unless all values lie in the
 *   upper half, where they would look flat; constant: only a constant
 */
export const linearAxis = (values, zoom, { fromZero = 'constant', labels = 4 } = {}) => {
  let [low, high] = [Infinity, -Infinity]
  for (const value of values) {
    if (value === null) continue
    low = Math.min(low, value)
    high = Math.max(high, value)
  }
  if (low > high) return {}
  const isConstant = high - low <= SAME * Math.max(Math.abs(low), Math.abs(high))
  const isFromZero = isConstant || fromZero === 'always' || (fromZero === 'usually' && low <= high / 2)
  const [least, most] = isFromZero ? [Math.min(low, 0), Math.max(high, 0) || (low < 0 ? 0 : 1)] : [low, high]
  const room = ROOM * (most - least)
  const range = zoom ?? [least && least - room, most && most + room]
  if (!range.every(Number.isFinite)) return {}
  const candidates = [labels, 2 * labels].map((most) =>
    ticksOf(/** @type {[number, number]} */ (range), most * LABEL, false),
  )
  const ticks = candidates.find((some) => some.length >= 3) ?? candidates[1]
  return { range, autorange: false, tickmode: 'array', tickvals: ticks, ticktext: ticks.map(valueText) }
}

/**
 * A logarithmic axis.
 * @param {(number|null)[]} values
 * @param {[number, number]} [zoom] logarithms of the ends that a user has chosen
 */
export const logAxis = (values, zoom) => {
  const [least, most] = zoom ? zoom.map((end) => 10 ** end) : positiveExtent(values)
  if (!(least <= most)) return { type: 'log' }
  // A constant has room on either side.
  const ticks = least === most ? logTicks(least / 10, most * 10) : logTicks(least, most)
  return { type: 'log', tickmode: 'array', tickvals: ticks, ticktext: ticks.map(valueText) }
}

/** Ticks around values, the first and the last the ends of the axis. @param {number[]} values */
export const dotTicks = (values) => {
  const [low, high] = [Math.min(...values), Math.max(...values)]
  const spread = high - low || Math.abs(high) / 20 || 1
  const rough = spread / 3
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = power * ([1, 2, 5].find((each) => each * power >= rough) ?? 10)
  const below = Math.floor((low - spread * 0.02) / step)
  const first = low >= 0 ? Math.max(below, 0) : below // no count or time is negative
  return Array.from({ length: Math.ceil((high + spread * 0.02) / step) - first + 1 }, (_, i) => (first + i) * step)
}
