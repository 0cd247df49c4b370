// Which series are smoothed: one rule for the charts of a run, of several runs, and of reports.
import { smoothed } from 'points'

/** Values that a scaler or a schedule has set. An average of them is a value that never was. */
const EXACT = new Set(['scale', 'lr'])

/** Return whether a view smooths a series. @param {string} name @param {{smooth: number}} view */
export const isSmoothed = (name, view) => view.smooth > 0 && !EXACT.has(name)

/**
 * A series as a view draws it.
 * @param {string} name
 * @param {{x: number[], y: (number|null)[]}} series
 * @param {{smooth: number}} view
 */
export const smoothedSeries = (name, { x, y }, view) => ({
  x,
  y: isSmoothed(name, view) ? smoothed(y, view.smooth) : y,
})
