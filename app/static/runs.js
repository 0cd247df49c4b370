// The list of runs: live rows, and the boxes for bulk actions.
import { watch } from 'live'
import { matchRows, replaceRows } from 'rows'

const list = document.querySelector('[data-list]')
const body = document.querySelector('[data-rows]')

const countTicked = () => {
  const ticked = list.querySelectorAll('[name=run]:checked').length
  list.querySelector('[data-bulk]').disabled = ticked === 0
  list.querySelector('[data-ticked]').textContent = ticked ? `${ticked} selected` : ''
}

/** Fetch this very page again for rows that came in. */
const refresh = async () => {
  const answer = await fetch(location.href)
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
  const fresh = page.querySelector('[data-rows]')
  if (answer.ok && fresh) matchRows(body, document.adoptNode(fresh))
}

if (list) {
  list.addEventListener('change', (event) => {
    if (event.target.matches('[data-tick-all]')) {
      for (const box of list.querySelectorAll('[name=run]')) box.checked = event.target.checked
    }
    countTicked()
  })
  countTicked()
  watch('/api/runs/live', body.dataset.cursor, ({ newest, rows }) => {
    replaceRows(body, Object.values(rows).join(''))
    if (newest > Number(body.dataset.newest)) {
      body.dataset.newest = newest
      refresh()
    }
    countTicked()
  })
} else {
  watch('/api/runs/live', '0', ({ newest }) => { if (newest > 0 && !location.search) location.reload() })
}
