// One moment on the whole page: words, tables and plots change in one task, as often as that is cheap.
import { still } from 'dom_updates'

/** Share of the time that showing changes may take, painting by the browser not counted. */
const SHARE = 0.12
/** A page is not further behind for that. */
const LONGEST_MS = 1500

/** What makes a newer snapshot of the page's data and shows it in words. @type {Set<() => void>} */
const news = new Set()
/** Drawings of the present snapshot. @type {Set<() => void>} */
const drawings = new Set()
/** First drawings, slower than all others: one a task, and no newer snapshot before they are done. @type {Set<() => void>} */
const first = new Set()
let [timer, freeAt] = [0, 0]

/** Calls a function once. @param {Set<() => void>} calls */
const callAll = (calls) => {
  for (const call of calls) { // also what is added by these
    calls.delete(call)
    call()
  }
}
/** @param {() => void} show */
const measured = (show) => {
  const start = performance.now()
  show()
  freeAt = start + Math.min((performance.now() - start) / SHARE, LONGEST_MS)
}
const publish = () => {
  if (first.size) return schedule()
  measured(() => { callAll(news); callAll(drawings) })
}
const run = () => {
  timer = 0
  const [drawing] = first
  if (drawing) {
    first.delete(drawing)
    drawing()
  } else if (news.size) {
    return still(publish)
  } else {
    measured(() => callAll(drawings))
  }
  if (first.size || drawings.size || news.size) schedule()
}
const schedule = () => {
  clearTimeout(timer)
  timer = setTimeout(run, first.size ? 0 : Math.max(0, freeAt - performance.now()))
}
/** @param {Set<() => void>} calls @returns {(call: () => void) => void} */
const queue = (calls) => (call) => {
  calls.add(call)
  schedule()
}

/** Show newer data when everything on the page may; drawings that it asks for come in the same task. */
export const showNews = queue(news)
/** Draw what the page has, with all else that is to be drawn. */
export const draw = queue(drawings)
/** Draw for the first time. */
export const drawFirst = queue(first)
