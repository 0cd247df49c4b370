// The list of runs: live rows, and the boxes for bulk actions.
import { inTurn } from 'answers'
import { follow } from 'live'
import { replaceRows } from 'rows'
import { createSelection, refetchRows } from 'selection'
import { still } from 'still'

const list = document.querySelector('[data-list]')
const body = document.querySelector('[data-rows]')
/** Run ids: the newest that there is, and that this page was fetched after. */
let newest = Number(body?.dataset.newest)
let shown = newest

/** @param {boolean} isUp */
const showWorkers = (isUp) => {
  for (const box of document.querySelectorAll('[data-worker-up]')) box.dataset.workerUp = String(isUp)
}

/** Fetch this very page again if it lacks the newest run that news told of. */
const refresh = inTurn(async () => {
  if (newest <= shown) return
  const asked = newest
  await refetchRows(body)
  shown = asked
})

if (list) {
  const countTicked = createSelection(list, () => refetchRows(body))
  follow('/api/v1/runs/live', body.dataset.cursor, (news) => {
    still(() => { showWorkers(news.is_worker_up); replaceRows(body, Object.values(news.rows).join('')); countTicked() })
    newest = news.newest
    refresh()
  }, { columns: body.dataset.columns })
} else {
  const empty = document.querySelector('.empty')
  follow('/api/v1/runs/live', empty?.dataset.cursor ?? '0', (news) => {
    still(() => showWorkers(news.is_worker_up))
    if (news.newest > 0 && !location.search) location.reload()
  })
}
