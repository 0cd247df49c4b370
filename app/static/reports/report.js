// A report: its panels are drawn when they come on screen, and with its tables kept up to date.
import { createPanelMenu } from 'chart_menu'
import { titleOf } from 'comparison'
import { still } from 'dom_updates'
import { inTurn, insisted, pause } from 'http'
import { follow } from 'live'
import { root } from 'root'
import { show } from 'rows'
import { placesOf } from 'run_colors'
import { createRunPanel } from 'run_panels'
import { seriesOf } from 'series_of_runs'

/** Share of the time that repeated requests may take. */
const SHARE = 0.25

const article = document.querySelector('[data-report]')
const { api, cursor } = article.dataset
/** Begins a panel's drawing. @type {Map<Element, () => void>} */
const waiting = new Map()
const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue
      observer.unobserve(target)
      waiting.get(target)?.()
    }
  },
  { rootMargin: '300px' },
)

/** @param {Found} section a panel of the report: a chart a metric */
const createPanel = (section) => {
  const { runs, x, smoothing, log } = section.dataset
  const ids = runs.split(',')
  const rows = [...section.querySelectorAll('[data-row]')]
  const names = rows.map(({ dataset }) => dataset.row)
  const isLog = log !== undefined
  /** @type {import('url_state').View} */
  const view = {
    x: /** @type {any} */ (x),
    smooth: Number(smoothing),
    range: null,
    rows: {},
    logs: isLog ? [...names] : [],
    trimmed: [],
    hidden: [],
    pinned: [],
    collapsed: [],
  }
  const lines = new Map(
    [...section.querySelectorAll('[data-run-line]')].map(({ dataset }) => [dataset.runLine, dataset]),
  )
  const places = placesOf(ids)
  const draw = () => {
    const known = ids.flatMap((id) => {
      const own = points.get(id)
      return own
        ? [{ id, label: lines.get(id)?.label ?? id, place: places.get(id) ?? 0, group: null, points: own }]
        : []
    })
    if (!known.length) return
    const without = known.filter((run) => !run.points.hasAxis(view.x))
    const note = section.querySelector('[data-unknown]')
    note.hidden = !without.length
    note.textContent = `Not drawn, because they have no ${titleOf(view.x)}: ${without.map(({ label }) => label).join(', ')}`
    for (const panel of panels)
      panel.draw({ runs: known.filter((run) => !without.includes(run)), view: { ...view }, band: 'range' })
  }
  const axis = x.startsWith('metric:') ? [x.slice('metric:'.length)] : []
  const { points, fetchSeries } = seriesOf(api, view, () => [...names, ...axis], draw)
  const panels = rows.map((element) =>
    createRunPanel(element, {
      view,
      runsOf: (row, some) => (row === 'scale' ? some.filter(({ id }) => lines.get(id)?.scaled !== undefined) : some),
      onPoint: (at) => {
        for (const panel of panels) panel.point(at)
      },
      onView: (isRange) => {
        draw()
        if (isRange) fetchSeries(ids)
      },
    }),
  )
  const panelOf = (row) => panels.find(({ name }) => name === row)
  createPanelMenu(
    section,
    `report-${section.dataset.reportPanel}`,
    {
      panelOf,
      mode: () => view.x,
      picture: (file, format, row) => panelOf(row)?.savePicture(file, format),
      view,
      onAxis: draw,
    },
    undefined,
    undefined,
    article.querySelector('[data-panel-menu]'),
  )
  let isDrawn = false
  waiting.set(section, () => {
    isDrawn = true
    fetchSeries(ids)
  })
  observer.observe(section)
  return {
    ids,
    /** @param {string[]} some of its runs, which changed */
    refresh: async (some) => {
      if (isDrawn) await fetchSeries(some)
    },
  }
}
const panels = [...article.querySelectorAll('[data-report-panel]')].map(createPanel)

const fetchTables = async () => {
  const tables = [...article.querySelectorAll('[data-report-table]')]
  if (!tables.length) return
  const page = new DOMParser().parseFromString(await (await insisted(location.href)).text(), 'text/html')
  still(() => {
    for (const table of tables) {
      const fresh = page.querySelector(`[data-report-table="${table.dataset.reportTable}"]`)
      if (fresh) show(table, fresh.innerHTML)
    }
  })
}
/** Runs that changed since they were fetched. @type {Set<string>} */
const changed = new Set()
const refresh = inTurn(async () => {
  if (!changed.size) return
  const some = new Set(changed)
  changed.clear()
  const start = performance.now()
  await Promise.all([
    fetchTables(),
    ...panels.map(({ ids, refresh: fetch }) => {
      const own = ids.filter((id) => some.has(id))
      return own.length ? fetch(own) : undefined
    }),
  ])
  await pause((performance.now() - start) * (1 / SHARE - 1))
})
// A preview is not at its own address.
if (cursor && api.endsWith('/api/v1') && !document.querySelector('[data-report-editor]')) {
  const all = new Set([...article.querySelectorAll('[data-runs]')].flatMap(({ dataset }) => dataset.runs.split(',')))
  follow(`${root}/api/v1/runs/live`, cursor, (news) => {
    for (const id of all) if (id in news.rows) changed.add(id)
    refresh()
  })
}
