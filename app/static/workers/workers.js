// The live grid of workers and the queue: fetched again when a worker starts or ends a run, and at intervals.
import { inTurn, insisted, pause } from 'http'
import { follow } from 'live'
import { root } from 'root'
import { mergeRows, show } from 'rows'
import { still } from 'dom_updates'

const [LEAST_MS, USUAL_MS] = [1000, 10_000]
/** @type {Found|null} */
const grid = document.querySelector('[data-grid]')
const queue = document.querySelector('[data-queue]')

const refresh = inTurn(async () => {
  const page = new DOMParser().parseFromString(await (await insisted(location.pathname)).text(), 'text/html')
  const fresh = page.querySelector('[data-queue]')
  if (queue && fresh) still(() => show(queue, fresh.innerHTML))
  await pause(LEAST_MS)
})

setInterval(() => {
  if (!document.hidden) refresh()
}, USUAL_MS)
if (grid) {
  follow(`${root}/api/v1/workers/live`, grid.dataset.cursor ?? '', (message) => {
    still(() => mergeRows(grid, message))
    refresh()
  })
}
