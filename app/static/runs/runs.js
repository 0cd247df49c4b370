// The list of runs: live rows, and the boxes for bulk actions.
import { insisted, inTurn } from 'http'
import { localTimes } from 'formats'
import { follow } from 'live'
import { createColumnRoom } from 'column_room'
import { createListCharts } from 'list_charts'
import { root } from 'root'
import { replaceRows } from 'rows'
import { createSelection, offerRestore, refetchRows } from 'selection'
import { still } from 'dom_updates'

/** Contents of a page without runs. @type {Found|null} */
const empty = document.querySelector('.empty')
/** Undefined while there is no run. @type {Found|undefined} */
let body
let countTicked = () => {}
/** Charts of the charts view. @type {ReturnType<typeof createListCharts>|null} */
let charts = null
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
  createColumnRoom(list)
}

/**
 * Replace the advice by the first run, unless a button of the advice has the focus.
 * @param {Document} page with the list
 */
const showFirst = async (page) => {
  const parts = [...page.querySelectorAll('#main > *')].map((part) => document.adoptNode(part))
  const list = parts.find((part) => part.matches('[data-list]'))
  if (!list) return
  localTimes(list)
  empty.before(...parts)
  for (const part of ['.identity', '.top-actions'])
    document.querySelector(part)?.replaceWith(document.adoptNode(page.querySelector(part)))
  if (empty.matches(':focus-within'))
    empty.addEventListener('focusout', () => setTimeout(() => empty.remove()), { once: true })
  else empty.remove()
  begin(list)
  await Promise.all([import('filter'), import('columns'), import('density')])
}

/** The header's facts, and the banner that stands while no worker was there when the page came. */
const showFacts = (message) => {
  const facts = document.querySelector('[data-facts]')
  if (facts && message.facts && sources !== message.facts) facts.innerHTML = sources = message.facts
  for (const box of document.querySelectorAll('[data-worker-up]')) box.dataset.workerUp = String(message.is_worker_up)
}

/**
 * Return whether these rows include a run of the other group, whose position only the server knows.
 * @param {Record<string, string>} rows
 */
const hasMoved = (rows) =>
  Object.entries(rows).some(([id, html]) => {
    const row = body?.querySelector(`tr[data-key="${id}"]`)
    return row && body?.querySelector('.band') && 'active' in row.dataset !== / data-active[ >]/.test(html)
  })

/** Fetch this very page again if it lacks the newest reported run. */
const refresh = inTurn(async () => {
  if (newest <= shown) return
  const asked = newest
  if (body) {
    await refetchRows(body)
  } else if (empty) {
    const answer = await insisted(location.href)
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
    const watched = page.querySelector('tr[data-watched] .name a')
    if (watched && empty.matches('.first-run')) return location.assign(watched.href)
    still(() => {
      showFirst(page)
    })
  }
  shown = asked
})

const list = document.querySelector('[data-list]')
if (list) begin(list)
offerRestore()
const section = document.querySelector('[data-list-charts]')
if (list && section) charts = createListCharts(section, list)
const { cursor = '0', columns = '' } = (body ?? empty)?.dataset ?? {}
follow(
  `${root}/api/v1/runs/live`,
  cursor,
  (message) => {
    still(() => {
      showFacts(message)
      if (hasMoved(message.rows)) shown = 0
      if (body) replaceRows(body, Object.values(message.rows).join(''))
      if (document.body.classList.contains('has-selected')) countTicked()
      charts?.update(Object.keys(message.rows))
    })
    newest = message.newest
    refresh()
  },
  { columns },
)
