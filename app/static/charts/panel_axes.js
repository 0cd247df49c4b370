// The y axes of panels: which are logarithmic, ignore outliers, or have a fixed range. The view has what is drawn, the
// arrangement what is kept.

/**
 * @typedef {{ranges: Record<string, import('url_state').Range>, logs: string[], trimmed: string[]}} Axes trimmed:
 *   panels without outliers
 */
/** @typedef {import('url_state').View} View */

/** Return choices that last as long as the page is open. @returns {Axes & {pinned: string[]}} */
export const unkept = () => ({ pinned: [], ranges: {}, logs: [], trimmed: [] })

/** @param {string[]} names @param {string} name @param {boolean} isIn */
const include = (names, name, isIn) => {
  const at = names.indexOf(name)
  if (isIn && at < 0) names.push(name)
  if (!isIn && at >= 0) names.splice(at, 1)
}

/** Draw with the kept axes, unless the address has others. @param {View} view @param {Axes} arrangement */
export const takeAxes = (view, { ranges, logs, trimmed }) => {
  view.rows = { ...ranges, ...view.rows }
  for (const name of logs) include(view.logs, name, true)
  for (const name of trimmed) include(view.trimmed, name, true)
}

/**
 * Fix the range of a panel.
 * @param {string} row
 * @param {import('url_state').Range|null} range null: automatic
 * @param {View} view
 * @param {Axes} arrangement
 */
export const setRange = (row, range, view, arrangement) => {
  for (const ranges of [view.rows, arrangement.ranges]) {
    if (range) ranges[row] = range
    else delete ranges[row]
  }
  if (range) for (const { trimmed } of [view, arrangement]) include(trimmed, row, false)
}

/**
 * Ignore the outliers of a panel, or show them.
 * @param {string} row
 * @param {boolean} isTrimmed
 * @param {View} view
 * @param {Axes} arrangement
 */
export const setTrimmed = (row, isTrimmed, view, arrangement) => {
  setRange(row, null, view, arrangement)
  for (const { trimmed } of [view, arrangement]) include(trimmed, row, isTrimmed)
}

/**
 * Make the axis of a panel logarithmic or linear, with its own range: exponents are none of a linear one.
 * @param {string} row
 * @param {boolean} isLog
 * @param {View} view
 * @param {Axes} arrangement
 */
export const setLog = (row, isLog, view, arrangement) => {
  for (const { logs } of [view, arrangement]) include(logs, row, isLog)
  setRange(row, null, view, arrangement)
}

/** Undo a zoom. @param {View} view @param {Axes} arrangement */
export const resetZoom = (view, { ranges }) => Object.assign(view, { range: null, rows: { ...ranges } })

/** @param {View} view @param {Axes} arrangement */
export const isZoomed = (view, { ranges }) =>
  view.range !== null || Object.entries(view.rows).some(([row, range]) => String(range) !== String(ranges[row]))
