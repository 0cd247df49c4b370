// Comparison page: the series of runs in one figure, and their table, fetched again while they change.
import { inTurn, insisted, pause } from 'http'
import { createPlot, zoomed } from 'charts'
import { comparisonFigure, stepAt, titleOf } from 'comparison'
import { count } from 'formats'
import { Legend } from 'legend'
import { follow } from 'live'
import { METRIC } from 'points'
import { root } from 'root'
import { show } from 'rows'
import { createScatter } from 'scatter'
import { seriesOf } from 'series_of_runs'
import { still } from 'dom_updates'
import { addressOf, readView, writeView } from 'url_state'

/** Rows of the figure: no more fit on a page, or into an address. */
const MOST_DRAWN = 12
/** Share of the time that repeated requests may take. */
const SHARE = 0.25

const article = document.querySelector('[data-runs]')
const table = article.querySelector('[data-fragment=comparison]')
const readout = article.querySelector('[data-readout]')
const { api } = article.dataset
const ids = article.dataset.runs.split(',')
const view = readView(article)
const choices = Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => ['by', 'band', 'settings', 'across', 'up'].includes(name)))
/** What each run has of each setting that differs. @type {Record<string, any[]>} */
let differences = {}
const legend = new Legend(article, ids, () => { write(); draw() })

const boxes = [...article.querySelectorAll('[name=draw]')]
const rows = () => boxes.filter(({ checked }) => checked).map(({ value, dataset }) => ({ name: value, title: dataset.title }))
const isMetricAxis = () => view.x.startsWith(METRIC)
const asked = () => [...rows().map(({ name }) => name), ...(isMetricAxis() ? [view.x.slice(METRIC.length)] : [])]
const { points, fetchSeries } = seriesOf(api, view, asked, () => draw())
/** Those that were there when the page came need no place in the address. */
const usual = boxes.filter(({ defaultChecked }) => defaultChecked).map(({ value }) => value).join()
const isAsked = new URLSearchParams(location.search).has('draw')

const write = () => {
  const names = rows().map(({ name }) => name)
  const isUsual = !isAsked && names.join() === usual
  writeView(view, { ...choices, draw: isUsual ? '' : names, hide: legend.hidden.join() })
}

let told = []
let axes = []
const chart = createPlot(article.querySelector('[data-plot]'), (wanted, colors) => {
  const made = comparisonFigure(wanted, colors, article.querySelector('[data-plot]').clientWidth)
  ;({ told, rows: axes } = made)
  return made
}, {
  plotly_hover: ({ points: [{ curveNumber, x, y }] }) => {
    const { run, label, steps } = told[curveNumber] ?? {}
    if (!steps?.length) return
    const at = view.x === 'step' || !run ? '' : ` · ${titleOf(view.x)} ${Number(x.toPrecision(6)).toLocaleString('en-US')}`
    const step = run ? `step ${count(stepAt(told[curveNumber], x))}` : `${titleOf(view.x)} ${Number(x.toPrecision(6)).toLocaleString('en-US')}`
    readout.textContent = `${label} · ${step}${at} · ${Number(y.toPrecision(6))}`
    legend.point(run?.id)
  },
  plotly_unhover: () => legend.point(),
  plotly_relayout: (change) => {
    const zoom = zoomed(change, axes)
    if (!zoom) return
    if (zoom.x !== undefined) view.range = zoom.x
    for (const [name, range] of Object.entries(zoom.rows)) {
      if (range) view.rows[name] = range
      else delete view.rows[name]
    }
    changeView(zoom.x !== undefined)
  },
})

const draw = () => {
  const shown = legend.shown(differences, choices.by)
  article.querySelector('[data-smooth]').textContent = String(view.smooth)
  article.querySelector('[data-reset-zoom]').hidden = !view.range && !Object.keys(view.rows).length
  const here = shown.flatMap((run) => {
    const known = points.get(run.id)
    return known ? [{ ...run, points: known }] : []
  })
  const unknown = here.filter((run) => !run.points.hasAxis(view.x))
  const drawn = here.filter((run) => !unknown.includes(run))
  const note = article.querySelector('[data-unknown]')
  note.hidden = !unknown.length
  const missing = view.x === 'examples' ? 'it is not known how many examples a step of theirs has' : `they have no ${titleOf(view.x)}`
  note.textContent = `Not drawn, for ${missing}: ${unknown.map(({ label }) => label).join(', ')}.`
  if (here.length || points.size === ids.length) chart.draw({ runs: drawn, rows: rows(), view: { ...view }, band: choices.band ?? 'range' })
}

const fetchWords = async () => {
  const [page, facts] = await Promise.all([insisted(addressOf(new URL(location.href))), insisted(`${api}/comparison?runs=${ids}`)])
  const fresh = new DOMParser().parseFromString(await page.text(), 'text/html').querySelector('[data-fragment=comparison]')
  const found = await facts.json()
  differences = found.differences
  scatter.draw(found, choices)
  still(() => {
    const heads = [table, fresh].map((each) => each.querySelector('thead').textContent)
    if (heads[0] === heads[1]) show(table, fresh.innerHTML)
    else table.innerHTML = fresh.innerHTML
    legend.paint()
  })
}

/** Runs that changed since they were fetched. @type {Set<string>} */
const changed = new Set(ids)
const refresh = inTurn(async () => {
  if (!changed.size) return
  const some = ids.filter((id) => changed.has(id))
  changed.clear()
  const start = performance.now()
  await Promise.all([fetchWords(), fetchSeries(some)])
  draw()
  if (article.dataset.over === 'false') await pause((performance.now() - start) * (1 / SHARE - 1))
})

/** @param {boolean} isMore whether other numbers are needed */
const changeView = (isMore) => {
  write()
  draw()
  if (isMore) fetchSeries(ids)
}

for (const input of article.querySelectorAll('[data-view]')) {
  const name = input.dataset.view
  if (input.type === 'radio') input.checked = view[name] === input.value
  else input.value = view[name]
  input.addEventListener('input', () => {
    view[name] = input.type === 'range' ? Number(input.value) : input.value
    // The same numbers would mean another stretch.
    const wasZoomed = name === 'x' && view.range
    if (name === 'x') view.range = null
    if (name === 'loss') delete view.rows.loss
    changeView(Boolean(wasZoomed) || isMetricAxis())
  })
}
for (const input of article.querySelectorAll('[data-choice]')) {
  const name = input.dataset.choice
  input.addEventListener('change', () => {
    choices[name] = input.value
    if (name === 'settings' && input.value === 'differing') delete choices.settings
    write()
    if (name === 'by') article.querySelector('[data-band]').hidden = !input.value
    if (name === 'settings') showSettings(input.value)
    else if (name === 'across' || name === 'up') scatter.choose(choices)
    else draw()
  })
}
/** @param {string} which */
const showSettings = async (which) => {
  const address = new URL(location.href)
  address.searchParams.set('settings', which)
  const page = await (await insisted(addressOf(address))).text()
  table.innerHTML = new DOMParser().parseFromString(page, 'text/html').querySelector('[data-fragment=comparison]').innerHTML
  legend.paint()
}
for (const box of boxes) {
  box.addEventListener('change', () => {
    if (rows().length > MOST_DRAWN || !rows().length) box.checked = !box.checked
    changeView(box.checked)
  })
}
/** Go on with other runs, and the view as it is. @param {string} runs */
const goOn = (runs) => {
  const address = new URL(`${root}/compare`, location.href)
  const query = new URLSearchParams(location.search)
  query.set('runs', runs.split(/[\s,]+/).filter(Boolean).join())
  address.search = query.toString()
  location.assign(addressOf(address))
}
article.addEventListener('click', (event) => {
  const { add, remove } = event.target.closest('[data-add], [data-remove]')?.dataset ?? {}
  if ((!add && !remove) || event.ctrlKey || event.metaKey || event.shiftKey) return
  event.preventDefault()
  goOn(add ? [...ids, add].join() : ids.filter((id) => id !== remove).join())
})
article.querySelector('[data-add-form]')?.addEventListener('submit', (event) => {
  event.preventDefault()
  goOn(event.target.elements.runs.value)
})
article.querySelector('[data-reset-zoom]').addEventListener('click', () => {
  view.range = null
  view.rows = {}
  changeView(true)
})
article.querySelector('[data-png]').addEventListener('click', () => chart.savePicture(`runs ${ids.join('-').slice(0, 60)}`, { showlegend: true, legend: { orientation: 'h', y: -0.15 } }))
const scatter = createScatter(article.querySelector('[data-scatter]'), ids, legend.labels)
refresh()

if (article.dataset.over === 'false') {
  follow(`${root}/api/v1/runs/live`, article.dataset.cursor, (news) => {
    for (const id of ids) if (id in news.rows) changed.add(id)
    refresh()
  })
}
