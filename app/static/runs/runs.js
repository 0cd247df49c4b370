// The list of runs: live rows, and the boxes for bulk actions.
import { insisted, inTurn } from 'http'
import { localTimes } from 'formats'
import { follow } from 'live'
import { root } from 'root'
import { replaceRows } from 'rows'
import { createSelection, refetchRows } from 'selection'
import { still } from 'dom_updates'

/** What a page without any run shows. @type {Found|null} */
const empty = document.querySelector('.empty')
/** Undefined while there is no run. @type {Found|undefined} */
let body
let countTicked = () => {}
/** Run ids: the newest that there is, and that this page was fetched after. */
let [newest, shown] = [0, 0]
/** The header's facts as they came last. */
let sources = ''

/** @param {Found} list */
const begin = (list) => {
  /** @type {Found} */
  const rows = list.querySelector('[data-rows]')
  body = rows
  newest = shown = Math.max(newest, Number(rows.dataset.newest))
  countTicked = createSelection(list, () => refetchRows(rows))
}

/** The first run comes in place of the advice, unless a key is about to press what that offers. @param {Found} list */
const showFirst = (list) => {
  localTimes(list)
  empty.before(list)
  if (empty.matches(':focus-within')) empty.addEventListener('focusout', () => setTimeout(() => empty.remove()), { once: true })
  else empty.remove()
  begin(list)
}

/** The header's facts, and the banner that stands while no worker was there when the page came. */
const showFacts = (news) => {
  const facts = document.querySelector('[data-facts]')
  if (facts && news.facts && sources !== news.facts) facts.innerHTML = sources = news.facts
  for (const box of document.querySelectorAll('[data-worker-up]')) box.dataset.workerUp = String(news.is_worker_up)
}

/** Whether a run of the other band is among these rows, which only the server can place. @param {Record<string, string>} rows */
const hasMoved = (rows) => Object.entries(rows).some(([id, html]) => {
  const row = body?.querySelector(`tr[data-key="${id}"]`)
  return row && body?.querySelector('.band') && 'active' in row.dataset !== / data-active[ >]/.test(html)
})

/** Fetch this very page again if it lacks the newest run that news told of. */
const refresh = inTurn(async () => {
  if (newest <= shown) return
  const asked = newest
  if (body) {
    await refetchRows(body)
  } else if (empty) {
    const answer = await insisted(location.href)
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
    const list = page.querySelector('[data-list]')
    const [total, fresh] = [document.querySelector('[data-total]'), page.querySelector('[data-total]')]
    if (list) still(() => { total?.replaceWith(document.adoptNode(fresh)); showFirst(document.adoptNode(list)) })
  }
  shown = asked
})

const list = document.querySelector('[data-list]')
if (list) begin(list)
const { cursor = '0', columns = '' } = (body ?? empty)?.dataset ?? {}
follow(`${root}/api/v1/runs/live`, cursor, (news) => {
  still(() => {
    showFacts(news)
    if (hasMoved(news.rows)) shown = 0
    if (body) replaceRows(body, Object.values(news.rows).join(''))
    countTicked()
  })
  newest = news.newest
  refresh()
}, { columns })
