// Numbers and times as text; halfstep/number_formats.py has the same on the server, and
// tests/number_formats.json the values and texts that the tests of both read.

const UNKNOWN = '–'
const [DIGITS, SHORT_DIGITS] = [4, 3] // significant ones of a number, and of one with a unit
const BYTE_UNITS = ['KiB', 'MiB', 'GiB', 'TiB']
// Made once: toLocaleString makes one each time.
const whole = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0, roundingMode: 'halfExpand' })
const plain = new Intl.NumberFormat('en-US', { maximumFractionDigits: 10 })

/** @param {number|null} [n] @returns {string} */
export const count = (n) => (n === null || n === undefined ? UNKNOWN : whole.format(n))

/**
 * A number with significant digits: null is unknown, NaN is a value.
 * @param {number|string|null} [value] a text is a number that JSON lacks, such as "Infinity"
 * @param {number} [digits]
 */
export const number = (value, digits = DIGITS) => {
  if (value === null || value === undefined) return UNKNOWN
  const exact = Number(value)
  if (!Number.isFinite(exact)) return Number.isNaN(exact) ? 'NaN' : exact > 0 ? '∞' : '−∞'
  const rounded = Number(exact.toPrecision(digits))
  if (Math.abs(rounded) >= 10_000 && Math.round(Math.abs(exact)) < 1e6) return whole.format(exact)
  if (rounded === 0) return '0'
  if (Math.abs(rounded) >= 0.0001 && Math.abs(rounded) < 1e6) return plain.format(rounded)
  const [mantissa, exponent] = exact.toExponential(digits - 1).split('e')
  return `${Number(mantissa)}e${Number(exponent)}`
}

/** A place on an axis: a step with all its digits, or seconds. @param {number} x */
export const place = (x) => (Number.isInteger(x) ? count(x) : number(x, 6))

/** A share of 1 in per cent; only the whole is 100 %. @param {number|null} [share] */
export const percent = (share) => {
  if (share === null || share === undefined) return UNKNOWN
  const text = number(100 * share, SHORT_DIGITS)
  return `${text === '100' && share < 1 ? '99.9' : text} %`
}

/** Bytes in the binary unit that fits. @param {number|null} [bytes] */
export const size = (bytes) => {
  if (bytes === null || bytes === undefined || !Number.isFinite(bytes)) return number(bytes)
  if (bytes < 1024) return `${number(bytes)} B`
  const exponent = Math.min(Math.floor(Math.log2(bytes) / 10), BYTE_UNITS.length)
  const value = bytes / 1024 ** exponent
  return `${number(value, value < 1000 ? SHORT_DIGITS : DIGITS)} ${BYTE_UNITS[exponent - 1]}`
}

/** A duration in its two largest units. @param {number|null} [seconds] */
export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return UNKNOWN
  if (!Number.isFinite(seconds)) return number(seconds)
  for (const [below, factor, unit] of /** @type {[number, number, string][]} */ ([
    [0.0009995, 1e6, 'µs'],
    [0.9995, 1e3, 'ms'],
    [9.995, 1, 's'],
  ])) {
    if (seconds > 0 && seconds < below) return `${number(seconds * factor, SHORT_DIGITS)} ${unit}`
  }
  const s = Math.round(Math.max(seconds, 0))
  if (s < 60) return `${s} s`
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`
  return `${count(Math.floor(s / 86400))} d ${Math.floor((s % 86400) / 3600)} h`
}

/** A power of two. @param {number} exponent  @returns {string} */
export const power = (exponent) => `2<sup>${String(exponent).replace('-', '−')}</sup>`

/** A loss scale, a power of two as the scaler makes them, as HTML. @param {number|null} [value]  @returns {string} */
export const scale = (value) => {
  const exponent = value ? Math.log2(value) : NaN
  return Number.isInteger(exponent) && Math.abs(exponent) > 3 ? power(exponent) : number(value)
}

/** @type {Record<string, string>} */
const ENTITIES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '%': '&#37;' }

/** Escape a name for Plotly, which interprets tags as markup and %{…} as a template. @param {string} text */
export const escaped = (text) => String(text).replace(/[&<>%]/g, (each) => ENTITIES[each])

// Made once: each takes longer than all that it formats.
const EARLIER = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit' })
const TODAY = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' })

/** Show the moments below an element in the browser's own zone. @param {ParentNode} root */
export const localTimes = (root) => {
  for (const time of root.querySelectorAll('time:not([data-local])')) {
    const moment = new Date(time.dateTime)
    const isToday = moment.toDateString() === new Date().toDateString()
    time.textContent = (isToday ? TODAY : EARLIER).format(moment)
    time.title = moment.toString()
    time.dataset.local = ''
  }
}
