// The page of runs side by side: a panel a series, their legend and their table, fetched again while they change.
import { createPanelMenu } from 'chart_menu'
import { arrangementOf, SEVERAL_RUNS } from 'chart_preferences'
import { inTurn, insisted, pause, showDamageOf } from 'http'
import { titleOf } from 'comparison'
import { place } from 'formats'
import { Legend } from 'legend'
import { follow } from 'live'
import { toast } from 'page'
import { createPanelList } from 'panel_list'
import { isZoomed, resetZoom, takeAxes } from 'panel_axes'
import { METRIC } from 'points'
import { root } from 'root'
import { show } from 'rows'
import { createRunPanel } from 'run_panels'
import { createScatter } from 'scatter'
import { seriesOf } from 'series_of_runs'
import { still } from 'dom_updates'
import { createToolbar } from 'toolbar'
import { addressOf, readView, writeView } from 'url_state'

/** Panels: no more fit into an address. */
const MOST_DRAWN = 12
/** Share of the time that repeated requests may take. */
const SHARE = 0.25

const article = document.querySelector('[data-runs]')
const table = article.querySelector('[data-fragment=comparison]')
const parity = article.querySelector('[data-fragment=parity]')
const { api } = article.dataset
const ids = article.dataset.runs.split(',')
if (api === '/api/v1') showDamageOf(`${root}${api}`, article.dataset.runs)
const view = readView(article)
const { arrangement, keep } = arrangementOf(article, SEVERAL_RUNS)
takeAxes(view, arrangement)
const toolbar = createToolbar(article, view, arrangement, {
  onArrange: keep,
  onChange: (field, wasZoomed) => changeView(field === 'x' && (wasZoomed || isMetricAxis())),
})
const choices = Object.fromEntries(
  [...new URLSearchParams(location.search)].filter(([name]) =>
    ['by', 'band', 'settings', 'across', 'up', 'figure'].includes(name),
  ),
)
/** Values of the differing settings by run. @type {Record<string, any[]>} */
let differences = {}
/** @type {ReturnType<typeof createScatter>|undefined} */
let scatter
const legend = new Legend(article, ids, () => {
  write()
  draw()
})

const menu = article.querySelector('#panels')
/** Series that are no metrics, with their titles. @type {Map<string, string>} */
const series = new Map(JSON.parse(menu.dataset.series))
const grid = article.querySelector('[data-panels]')
const blank = /** @type {any} */ (article.querySelector('template[data-panel]')).content.firstElementChild
/** What is drawn, in order. */
const names = [...grid.children].map(({ dataset }) => dataset.row)
const rows = () => names.map((name) => ({ name, title: series.get(name) ?? name }))
const isMetricAxis = () => view.x.startsWith(METRIC)
const asked = () => [...names, ...(isMetricAxis() ? [view.x.slice(METRIC.length)] : [])]
const { points, fetchSeries } = seriesOf(api, view, asked, () => draw())
/** Those that were there when the page came need no place in the address. */
const usual = names.join()
const isAsked = new URLSearchParams(location.search).has('draw')

const write = () => {
  const isUsual = !isAsked && names.join() === usual
  writeView(view, { ...choices, draw: isUsual ? '' : names, hide: legend.hidden.join() })
  showReportLinks()
}
/** A report shows what this page draws. */
const showReportLinks = () => {
  const query = new URLSearchParams({
    runs: ids.filter((id) => !legend.hidden.includes(id)).join(),
    x: view.x,
    ...(view.smooth && { smoothing: String(view.smooth) }),
  })
  for (const name of names) query.append('metrics', name)
  for (const link of document.querySelectorAll('[data-to-report]')) link.href = `${root}/reports/new?${query}`
}

/** Panels by series. @type {Map<string, ReturnType<typeof createRunPanel>>} */
const panels = new Map()
const recordedOf = (name) => panels.get(name)?.drawn?.recorded() ?? []
const scaled = new Set(legend.boxes.filter(({ dataset }) => 'scaled' in dataset).map(({ value }) => value))
const onPoint = (x) => {
  for (const panel of panels.values()) panel.point(x)
  const at = x === null ? '' : place(x)
  legend.showAt(
    x === null ? 'latest values' : `at ${view.x === 'step' ? 'step' : titleOf(view.x)} ${at}`,
    x,
    recordedOf,
  )
}
/** A panel for each chosen series, in their order. */
const arrange = () => {
  const chosen = rows()
  for (const [name, { element }] of panels) {
    if (names.includes(name)) continue
    element.remove()
    panels.delete(name)
  }
  chosen.forEach(({ name, title }, i) => {
    const element =
      panels.get(name)?.element ?? grid.querySelector(`[data-row="${CSS.escape(name)}"]`) ?? blank.cloneNode(true)
    if (!panels.has(name)) {
      Object.assign(element.dataset, { row: name, title })
      element.ariaLabel = title
      Object.assign(element.querySelector('h3'), { textContent: title, title })
      element
        .querySelector('.plot')
        .setAttribute('aria-label', `${title} of the runs; the table below has the last and best values`)
      element.querySelector('.plot').dataset.plot = name
      element.querySelector('[data-full]').ariaLabel = `${title}: full screen`
      element.querySelector('[data-more]').ariaLabel = `${title}: more`
      panels.set(
        name,
        createRunPanel(element, {
          view,
          runsOf: (row, runs) => (row === 'scale' ? runs.filter(({ id }) => scaled.has(id)) : runs),
          onPoint,
          onLine: (id) => legend.point(id),
          onView: changeView,
        }),
      )
    }
    if (grid.children[i] !== element) grid.insertBefore(element, grid.children[i] ?? null)
  })
  article.querySelector('[data-panel-count]').textContent = String(chosen.length)
}

const draw = () => {
  const shown = legend.shown(differences, choices.by)
  if (scatter) scatter.group(legend.groups)
  toolbar.show()
  article.querySelector('[data-reset-zoom]').hidden = !isZoomed(view, arrangement)
  const here = shown.flatMap((run) => {
    const known = points.get(run.id)
    return known ? [{ ...run, points: known }] : []
  })
  const unknown = here.filter((run) => !run.points.hasAxis(view.x))
  const drawn = here.filter((run) => !unknown.includes(run))
  const note = article.querySelector('[data-unknown]')
  note.hidden = !unknown.length
  const missing = view.x === 'examples' ? 'their examples per step are unknown' : `they have no ${titleOf(view.x)}`
  note.textContent = `Not drawn, because ${missing}: ${unknown.map(({ label }) => label).join(', ')}`
  if (!here.length && points.size !== ids.length) return
  for (const panel of panels.values()) panel.draw({ runs: drawn, view: { ...view }, band: choices.band ?? 'range' })
}

const fetchWords = async () => {
  const [page, facts] = await Promise.all([
    insisted(addressOf(new URL(location.href))),
    insisted(
      `${api}/comparison?${new URLSearchParams([['runs', ids.join()], ...names.filter((name) => !series.has(name)).map((name) => ['metric', name])])}`,
    ),
  ])
  const fresh = new DOMParser().parseFromString(await page.text(), 'text/html')
  const content = fresh.querySelector('[data-fragment=comparison]')
  const found = await facts.json()
  differences = found.differences
  scatter?.draw(found, choices)
  still(() => {
    const heads = [table, content].map((each) => each.querySelector('thead').textContent)
    if (heads[0] === heads[1]) show(table, content.innerHTML)
    else table.innerHTML = content.innerHTML
    const paired = fresh.querySelector('[data-fragment=parity]')
    // Only a change, so that the list of pairs stays open.
    if (parity && paired && parity.textContent !== paired.textContent) parity.innerHTML = paired.innerHTML
    legend.update(fresh)
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

article.querySelector('[data-mean]')?.addEventListener('change', ({ target }) => {
  const { band, by } = target.selectedOptions[0].dataset
  Object.assign(choices, { by: by ?? '', band: by ? band : '' })
  write()
  draw()
})
for (const input of article.querySelectorAll('[data-choice]')) {
  const name = input.dataset.choice
  input.addEventListener('change', () => {
    choices[name] = input.value
    if (name === 'settings' && input.value === 'differing') delete choices.settings
    write()
    if (name === 'settings') showSettings(input.value)
    else scatter?.choose(choices)
  })
}
/** @param {string} which */
const showSettings = async (which) => {
  const address = new URL(location.href)
  address.searchParams.set('settings', which)
  const page = await (await insisted(addressOf(address))).text()
  table.innerHTML = new DOMParser()
    .parseFromString(page, 'text/html')
    .querySelector('[data-fragment=comparison]').innerHTML
  legend.paint()
}
/** Draw a panel, or no longer; at least one, and no more than fit into an address. @param {string} name */
const toggle = (name) => {
  const isDrawn = names.includes(name)
  if (isDrawn ? names.length === 1 : names.length === MOST_DRAWN)
    return toast(isDrawn ? 'At least 1 panel.' : `At most ${MOST_DRAWN} panels.`)
  if (isDrawn) names.splice(names.indexOf(name), 1)
  else names.push(name)
  arrange()
  changeView(!isDrawn)
  if (!isDrawn && !series.has(name)) fetchWords()
}
const panelList = createPanelList(menu, {
  api,
  series: [...series],
  runs: () => ids,
  first: () => [...new Set([...JSON.parse(menu.dataset.pinned), ...names.filter((name) => !series.has(name))])],
  row: ([name, title]) => {
    const row = document.createElement('label')
    const box = Object.assign(document.createElement('input'), {
      type: 'checkbox',
      value: name,
      checked: names.includes(name),
    })
    box.addEventListener('change', () => {
      toggle(name)
      box.checked = names.includes(name)
    })
    row.append(box, Object.assign(document.createElement('span'), { className: 'cut', textContent: title, title }))
    return row
  },
})
menu.addEventListener('toggle', (event) => {
  if (/** @type {any} */ (event).newState !== 'open') return
  panelList.show()
  menu.querySelector('[data-find-panel]').focus()
})
const test = document.querySelector('#parity form')
if (test) {
  /** The unit of the margin, which counts for no other. */
  const unitOf = () => (test.elements.value.value === 'time_to_target' ? 's' : test.elements.metric.value)
  let unit = unitOf()
  test.addEventListener('change', () => {
    if (unitOf() !== unit) test.elements.margin.value = ''
    unit = unitOf()
    for (const each of test.querySelectorAll('[data-of]')) each.hidden = each.dataset.of !== test.elements.value.value
  })
}
/** Compare other runs and keep the current view. @param {string} runs */
const goOn = (runs) => {
  const address = new URL(`${root}/compare`, location.href)
  const query = new URLSearchParams(location.search)
  query.set(
    'runs',
    runs
      .split(/[\s,]+/)
      .filter(Boolean)
      .join(),
  )
  address.search = query.toString()
  location.assign(addressOf(address))
}
document.addEventListener('click', (event) => {
  const { add, remove } = event.target.closest('[data-add], [data-remove]')?.dataset ?? {}
  if ((!add && !remove) || event.ctrlKey || event.metaKey || event.shiftKey) return
  event.preventDefault()
  goOn(add ? [...ids, add].join() : ids.filter((id) => id !== remove).join())
})
document.querySelector('[data-add-form]')?.addEventListener('submit', (event) => {
  event.preventDefault()
  goOn(event.target.elements.runs.value)
})
article.querySelector('[data-reset-zoom]').addEventListener('click', () => {
  resetZoom(view, arrangement)
  changeView(true)
})
createPanelMenu(
  article,
  `runs ${ids.join('-').slice(0, 60)}`,
  {
    panelOf: (row) => panels.get(row),
    mode: () => view.x,
    picture: (file, format, row) => panels.get(row)?.savePicture(file, format),
    view,
    onAxis: () => changeView(false),
    hide: toggle,
  },
  arrangement,
  keep,
)
legend.listen((id) => {
  legend.point(id)
  for (const panel of panels.values()) panel.bringForward(id)
})
scatter = createScatter(article, ids, legend.labels, {
  low: JSON.parse(article.dataset.low),
  paint: () => legend.paint(),
})
arrange()
showReportLinks()
refresh()

if (article.dataset.over === 'false') {
  follow(`${root}/api/v1/runs/live`, article.dataset.cursor, (message) => {
    for (const id of ids) if (id in message.rows) changed.add(id)
    refresh()
  })
}
