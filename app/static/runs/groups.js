// The grouped list: fetched again after each change of a run, because any group may change.
import { inTurn, insisted, pause } from 'http'
import { follow } from 'live'
import { root } from 'root'
import { matchRows } from 'rows'
import { still } from 'dom_updates'

/** Fetching may take this share of the time, and comes no oftener than that. */
const [SHARE, LEAST_MS] = [0.2, 1000]
/** @type {Found|null} */
const body = document.querySelector('[data-groups]')

const refresh = inTurn(async () => {
  const start = performance.now()
  const answer = await insisted(location.href)
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
  const [fresh, total] = [page.querySelector('[data-groups]'), page.querySelector('[data-total]')]
  still(() => {
    if (body && fresh) matchRows(body, document.adoptNode(fresh))
    document.querySelector('[data-total]').textContent = total.textContent
  })
  await pause(Math.max((performance.now() - start) * (1 / SHARE - 1), LEAST_MS))
})

if (body) follow(`${root}/api/v1/runs/live`, body.dataset.cursor, refresh)
