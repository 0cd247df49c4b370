// Numbers and times as people read them; formats.py says the same on the server.

const numbers = new Intl.NumberFormat('en-US') // made once: toLocaleString makes one each time

/** @param {number} n @returns {string} */
export const count = (n) => numbers.format(n)

/** A power of two. @param {number} exponent  @returns {string} */
export const power = (exponent) => `2<sup>${String(exponent).replace('-', '−')}</sup>`

/** @param {number} value a power of two, as the scaler makes them  @returns {string} */
export const scale = (value) => {
  const exponent = Math.log2(value)
  return Number.isInteger(exponent) && Math.abs(exponent) > 3
    ? power(exponent)
    : String(Number(value.toPrecision(4)))
}

/** @type {Record<string, string>} */
const ENTITIES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '%': '&#37;' }

/** Escape a name for Plotly, which interprets tags as markup and %{…} as a template. @param {string} text */
export const escaped = (text) => String(text).replace(/[&<>%]/g, (each) => ENTITIES[each])

/** Bytes of a file in the unit that fits. @param {number} bytes @returns {string} */
export const size = (bytes) => {
  if (bytes < 1000) return `${bytes} B`
  const exponent = Math.min(Math.floor(Math.log10(bytes) / 3), 4)
  const value = bytes / 1000 ** exponent
  return `${value < 1000 ? Number(value.toPrecision(3)) : count(Math.round(value))} ${['kB', 'MB', 'GB', 'TB'][exponent - 1]}`
}

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
