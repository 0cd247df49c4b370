// What stands over the empty axes until the first step: what the run does meanwhile, and for how long.

const WORDS = {
  queued: 'In the queue',
  starting: 'Starting: its process loads torch, the recipe and the data',
  running: 'Running; no step was heard of yet',
  paused: 'Paused before its first step',
}

/** @param {number} seconds */
const duration = (seconds) => (seconds < 100 ? `${Math.floor(seconds)} s` : `${Math.floor(seconds / 60)} min`)

/** @param {HTMLElement} section */
export const createStarting = (section) => {
  const said = section.querySelector('[data-starting]')
  const part = (name) => said.querySelector(`[data-${name}]`)
  const article = section.closest('[data-run]')
  let status = article.dataset.status
  let since = performance.now() - 1000 * Number(article.dataset.statusSeconds)
  const say = () => {
    if (said.hidden) return
    const [words, seconds] = [WORDS[status] ?? '', `, ${duration((performance.now() - since) / 1000)}`]
    if (part('words').textContent !== words) part('words').textContent = words
    part('seconds').textContent = words && seconds
    setTimeout(say, 1000)
  }
  /** @param {{status: string, step: number}} run */
  const show = (run) => {
    if (run.status !== status) [status, since] = [run.status, performance.now()]
    const isHidden = run.step > 0 || !(status in WORDS)
    if (said.hidden !== isHidden) said.hidden = isHidden
  }
  say()
  return { show }
}
