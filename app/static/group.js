// The page of a comparison: one chart of all its runs, and a table, fetched anew while they change.
import { inTurn, insisted } from 'answers'
import { createPlot } from 'charts'
import { comparisonFigure } from 'comparison'
import { follow } from 'live'
import { Points } from 'points'
import { show } from 'rows'
import { still } from 'still'
import { readView, writeView } from 'view'

const article = document.querySelector('[data-group]')
const table = article.querySelector('[data-fragment=comparison]')
const columns = [...table.querySelectorAll('[data-run]')].map(({ dataset }) => ({ id: dataset.run, label: dataset.label }))
const chart = createPlot(article.querySelector('[data-plot]'), comparisonFigure)
const view = readView()
/** @type {Map<string, Points>} */
const points = new Map()

/** @param {string} id of a run */
const fetchPoints = async (id) => {
  const page = await (await insisted(`/api/v1/runs/${id}/series?points=2000`)).json()
  points.set(id, new Points(page))
}

const draw = () => {
  article.querySelector('[data-smooth]').textContent = String(view.smooth)
  if (points.size < columns.length) return // the first answers are still to come
  const runs = columns.map(({ id, label }) => ({ label, points: points.get(id) }))
  chart.draw({ runs, view: { ...view } })
}

/** Runs that changed since they were fetched. @type {Set<string>} */
const changed = new Set(columns.map(({ id }) => id))
const refresh = inTurn(async () => {
  if (!changed.size) return
  const ids = [...changed]
  changed.clear()
  const [page] = await Promise.all([insisted(location.pathname), ...ids.map(fetchPoints)])
  const fresh = new DOMParser().parseFromString(await page.text(), 'text/html')
  still(() => show(table, fresh.querySelector('[data-fragment=comparison]').innerHTML))
  draw()
})

for (const input of article.querySelectorAll('[data-view]')) {
  const name = input.dataset.view
  if (input.type === 'radio') input.checked = view[name] === input.value
  else input.value = view[name]
  input.addEventListener('input', () => {
    view[name] = input.type === 'range' ? Number(input.value) : input.value
    writeView(view)
    draw()
  })
}
article.querySelector('[data-png]').addEventListener('click', () => chart.savePicture(`comparison${article.dataset.group}`))
refresh()

if (article.dataset.over === 'false') {
  follow('/api/v1/runs/live', article.dataset.cursor, (news) => {
    for (const { id } of columns) if (id in news.rows) changed.add(id)
    refresh()
  })
}
