// What stands over the empty axes until the first step, or the first metric of a script that only logs: what the run
// does meanwhile, and for how long.
import { duration } from 'formats'

const WORDS = {
  queued: 'In the queue',
  starting: 'Starting: its process loads torch, the recipe and the data',
  running: 'Running; no step received yet',
  pausing: 'Pausing before its first step',
  paused: 'Paused before its first step',
  stopping: 'Stopping before its first step',
  unreachable: 'Its worker cannot be reached, and no step received yet',
}
const OVER = 'No step was recorded' // whenever that was

/** @param {HTMLElement} section */
export const createStarting = (section) => {
  const note = section.querySelector('[data-starting]')
  if (!note) return { show: () => {} }
  const part = (name) => note.querySelector(`[data-${name}]`)
  const article = section.closest('[data-run]')
  let status = article.dataset.status
  let since = performance.now() - 1000 * Number(article.dataset.statusSeconds)
  let timer = 0
  const say = () => {
    clearTimeout(timer)
    if (note.hidden) return
    const words = WORDS[status] ?? OVER
    if (part('words').textContent !== words) part('words').textContent = words
    part('seconds').textContent = status in WORDS ? `, ${duration(Math.floor((performance.now() - since) / 1000))}` : ''
    if (status in WORDS) timer = setTimeout(say, 1000)
  }
  /** @param {{status: string, step: number}} run step: up to which something is drawn */
  const show = (run) => {
    const isNew = run.status !== status
    if (isNew) [status, since] = [run.status, performance.now()]
    const isHidden = run.step > 0
    if (note.hidden === isHidden && !isNew) return
    note.hidden = isHidden
    say()
  }
  say()
  return { show }
}
