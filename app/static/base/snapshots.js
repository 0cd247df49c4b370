// One moment on the whole page: words, tables and plots change in one task, as often as that is cheap.
import { still } from 'dom_updates'

/** Share of the time that showing changes may take, with the layout and painting of a frame. */
const SHARE = 0.14
/** A page is not further behind for that. */
const LONGEST_MS = 1200

/** Functions that take a newer snapshot of the page's data and show its texts. @type {Set<() => void>} */
const news = new Set()
/** Drawings of the present snapshot. @type {Set<() => void>} */
const drawings = new Set()
/**
 * First drawings, slower than all others: one a task, and no newer snapshot before they are done.
 * @type {Set<() => void>}
 */
const first = new Set()
let [timer, freeAt] = [0, 0]

/** Calls a function once. @param {Set<() => void>} calls */
const callAll = (calls) => {
  for (const call of calls) {
    // also what is added by these
    calls.delete(call)
    call()
  }
}
/** @param {() => void} show */
const measured = (show) => {
  const start = performance.now()
  show()
  const cost = performance.now() - start
  const rest = (painting) => {
    freeAt = start + Math.min((cost + painting) / SHARE, LONGEST_MS)
  }
  rest(0)
  requestAnimationFrame(() => {
    const begun = performance.now()
    setTimeout(() => rest(performance.now() - begun)) // when the frame has been painted
  })
}
const publish = () => {
  if (first.size) return schedule()
  measured(() => {
    callAll(news)
    callAll(drawings)
  })
}
const run = () => {
  const [drawing] = first
  if (drawing) {
    first.delete(drawing)
    drawing()
    return schedule()
  }
  if (performance.now() < freeAt) return schedule()
  if (news.size) still(publish)
  if (drawings.size) measured(() => callAll(drawings)) // while the news wait for a control that is in use
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

/** Show newer data when everything on the page is ready; its drawings are made in the same task. */
export const showNews = queue(news)
/** Draw what the page has, with all else that is to be drawn. */
export const draw = queue(drawings)
/** Draw for the first time. */
export const drawFirst = queue(first)
