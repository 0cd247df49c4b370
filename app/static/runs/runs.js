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

/** @param {boolean} isUp */
const showWorkers = (isUp) => {
  for (const box of document.querySelectorAll('[data-worker-up]')) box.dataset.workerUp = String(isUp)
}

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
    showWorkers(news.is_worker_up)
    if (body) replaceRows(body, Object.values(news.rows).join(''))
    countTicked()
  })
  newest = news.newest
  refresh()
}, { columns })
