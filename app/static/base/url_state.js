// View of the charts, stored in the URL, so that a reload or a link shows the same.

/**
 * rows: of those rows that were zoomed, by name, from where to where y goes; exponents on a log axis.
 * search: part of the names of metrics that have panels.
 * logs: rows whose y axis is logarithmic by choice; trimmed: rows that ignore outliers; hidden: lines that are not
 * drawn; pinned, collapsed: metrics that come first, groups that are folded, which the browser keeps.
 * @typedef {[number, number]} Range
 * @typedef {{
 *   x: import('points').Axis,
 *   smooth: number,
 *   range: Range|null,
 *   search?: string,
 *   rows: Record<string, Range>,
 *   logs: string[],
 *   trimmed: string[],
 *   hidden: string[],
 *   pinned: string[],
 *   collapsed: string[]
 * }} View
 */

const [ROW, LOG, TRIMMED, SEARCH] = ['y.', 'ylog', 'ytrim', 'metric_search']
const MOST = 50 // rows that each of these names
/** @type {import('points').Axis[]} */
const AXES = ['step', 'applied', 'time', 'examples']
/** @param {Element} choice @returns {import('points').Axis} */
const axisOf = (choice) => /** @type {any} */ (choice).value

/** @param {string|null} text @returns {Range|null} */
const readRange = (text) => {
  const [low, high, ...others] = (text ?? '').split(',').map(Number)
  return text && !others.length && Number.isFinite(low) && Number.isFinite(high) ? [low, high] : null
}
/** @param {Range} range */
const rangeText = (range) => range.map((x) => Number(x.toPrecision(8))).join(',')

/** Default x axis, if the URL has none. @type {import('points').Axis} */
let usualAxis = 'step'

/** @param {Element} [section] whose choices of an axis there are, the usual one checked @returns {View} */
export const readView = (section) => {
  const choices = section ? [...section.querySelectorAll('[data-view=x]')] : []
  const axes = choices.length ? choices.map(axisOf) : AXES
  const checked = choices.find((/** @type {any} */ choice) => choice.defaultChecked)
  usualAxis = checked ? axisOf(checked) : 'step'
  const query = new URLSearchParams(location.search)
  const [wanted, range] = [query.get('x'), readRange(query.get('range'))]
  /** @type {Record<string, Range>} */
  const rows = {}
  for (const [name, text] of query) {
    const range = name.startsWith(ROW) && readRange(text)
    if (range) rows[name.slice(ROW.length)] = range
  }
  const logs = query.getAll(LOG).slice(0, MOST)
  if (query.get('loss') === 'log' && !logs.includes('loss')) logs.push('loss') // as earlier versions wrote it
  return {
    x: axes.find((axis) => axis === wanted) ?? usualAxis,
    smooth: Math.min(Math.max(Number(query.get('smooth')) || 0, 0), 0.99),
    range: range && range[0] < range[1] ? range : null,
    search: query.get(SEARCH) ?? '',
    hidden: query.getAll('hide'),
    pinned: [],
    collapsed: [],
    rows,
    logs,
    trimmed: query.getAll(TRIMMED).slice(0, MOST),
  }
}

/** An address whose commas can be read. @param {URL} address */
export const addressOf = ({ href }) => href.replaceAll('%2C', ',')

/** Safari allows a hundred changes of the address in thirty seconds, and a slider makes more. */
const WRITE_MS = 300
let writing = 0
/** @type {{view: View, further: Record<string, string|string[]>}|null} */
let unwritten = null

/**
 * @param {View} view
 * @param {Record<string, string|string[]>} [further] what else the page keeps there; empty: nothing
 */
export const writeView = (view, further = {}) => {
  unwritten = { view, further }
  if (!writing) write()
}

const write = () => {
  writing = 0
  if (!unwritten) return
  writing = setTimeout(write, WRITE_MS)
  const { view, further } = unwritten
  unwritten = null
  const address = new URL(location.href)
  const set = (name, value, usual) =>
    value === usual ? address.searchParams.delete(name) : address.searchParams.set(name, value)
  set('x', view.x, usualAxis)
  address.searchParams.delete('loss')
  set('smooth', view.smooth, 0)
  set('range', view.range && rangeText(view.range), null)
  set(SEARCH, view.search ?? '', '')
  for (const name of [...address.searchParams.keys()]) if (name.startsWith(ROW)) address.searchParams.delete(name)
  for (const [name, range] of Object.entries(view.rows)) set(ROW + name, rangeText(range), null)
  for (const [name, value] of Object.entries({ [LOG]: view.logs, [TRIMMED]: view.trimmed, ...further })) {
    address.searchParams.delete(name)
    for (const each of [value].flat()) if (each) address.searchParams.append(name, each)
  }
  history.replaceState(null, '', addressOf(address))
}
addEventListener('pagehide', write)
