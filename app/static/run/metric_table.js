// The table of metrics. Of many metrics it has a page of those that match the search, and is up to date while it is
// in view.
import { insisted } from 'http'
import { mergeRows } from 'rows'
import { addressOf } from 'url_state'

/** Time after the last change of a search before it is requested. */
const TYPING_MS = 300

/**
 * @param {HTMLElement} article
 * @param {import('url_state').View} view
 * @param {Pick<ReturnType<typeof import('series').createSeries>, 'metricQuery'|'onceReached'>} series
 * @param {() => void} [onNeed] it needs the rows of others, or none
 */
export const createMetricTable = (article, view, { metricQuery, onceReached }, onNeed = () => {}) => {
  const box = article.querySelector('[data-metric-table]')
  /** Rows that came since the newest request. @type {any[]} */
  const received = []
  let [isInView, searched, timer] = [false, view.search ?? '', 0]
  /** The page comes after this name. */
  let after = new URLSearchParams(location.search).get('metric_after') ?? ''
  let requests = 0
  const refresh = async () => {
    if (searched !== (view.search ?? '')) after = ''
    searched = view.search ?? ''
    onNeed() // first, so that nothing is lost between the two
    received.length = 0
    const number = ++requests
    const address = new URL(location.href)
    address.searchParams.set('metric_search', searched)
    address.searchParams.set('metric_after', after)
    const page = await (await insisted(addressOf(address))).text()
    const fresh = new DOMParser().parseFromString(page, 'text/html')
    const show = () => {
      if (number !== requests) return
      box.replaceChildren(...fresh.querySelector('[data-metric-table]').childNodes)
      received.forEach(mergeInto) // which the page may be too old to hold
    }
    const { cursor } = fresh.querySelector('[data-run]').dataset
    if (cursor) onceReached(cursor, show)
    else show()
  }
  const mergeInto = (changed) => mergeRows(box.querySelector('[data-fragment=metrics]'), changed)
  const update = () => {
    clearTimeout(timer)
    if (searched !== (view.search ?? '') || (isInView && 'metric' in metricQuery()))
      timer = setTimeout(refresh, TYPING_MS)
    else onNeed()
  }
  new IntersectionObserver((entries) => {
    isInView = entries.at(-1)?.isIntersecting ?? false
    update()
  }).observe(box)
  article.querySelector('[data-metric-search]')?.addEventListener('input', update)
  box.addEventListener('click', async (event) => {
    const link = event.target.closest('[data-after]')
    if (!link) return
    event.preventDefault()
    after = link.dataset.after
    await refresh()
    box.querySelector('[data-fragment=metrics]').focus({ preventScroll: true })
  })
  return {
    /** Return the stream's parameters. @returns {Record<string, string>} */
    query: () => (isInView ? { metric_search: searched, metric_after: after, metric_limit: '100' } : {}),
    /** @param {any} changed rows, as mergeRows takes them */
    merge: (changed) => {
      received.push(changed)
      mergeInto(changed)
    },
  }
}
