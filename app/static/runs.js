// The list of runs: live rows, and the boxes for bulk actions.
import { inTurn, insisted } from 'answers'
import { follow } from 'live'
import { matchRows, replaceRows } from 'rows'
import { still } from 'still'

const list = document.querySelector('[data-list]')
const body = document.querySelector('[data-rows]')
/** Run ids: the newest that there is, and that this page was fetched after. */
let newest = Number(body?.dataset.newest)
let shown = newest

const countTicked = () => {
  const ticked = list.querySelectorAll('[name=run]:checked').length
  list.querySelector('[data-bulk]').disabled = ticked === 0
  list.querySelector('[data-ticked]').textContent = ticked ? `${ticked} selected` : ''
}

/** @param {boolean} isUp */
const showWorkers = (isUp) => {
  for (const box of document.querySelectorAll('[data-worker-up]')) box.dataset.workerUp = String(isUp)
}

/** Fetch this very page again if it lacks the newest run that news told of. */
const refresh = inTurn(async () => {
  if (newest <= shown) return
  const asked = newest
  const answer = await insisted(location.href)
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
  const fresh = page.querySelector('[data-rows]')
  if (fresh) still(() => matchRows(body, document.adoptNode(fresh)))
  shown = asked
})

if (list) {
  list.addEventListener('change', (event) => {
    if (event.target.matches('[data-tick-all]')) {
      for (const box of list.querySelectorAll('[name=run]')) box.checked = event.target.checked
    }
    countTicked()
  })
  countTicked()
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
