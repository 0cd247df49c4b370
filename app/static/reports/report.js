// A report, whose panels and tables are kept up to date.
import { still } from 'dom_updates'
import { inTurn, insisted, pause } from 'http'
import { follow } from 'live'
import { createReportPanel } from 'report_panels'
import { root } from 'root'
import { show } from 'rows'

/** Share of the time that repeated requests may take. */
const SHARE = 0.25

const article = document.querySelector('[data-report]')
const { api, cursor } = article.dataset
const panels = [...article.querySelectorAll('[data-report-panel]')].map((section) =>
  createReportPanel(section, article),
)

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
if (cursor && api.endsWith('/api/v1')) {
  const all = new Set([...article.querySelectorAll('[data-runs]')].flatMap(({ dataset }) => dataset.runs.split(',')))
  follow(`${root}/api/v1/runs/live`, cursor, (news) => {
    for (const id of all) if (id in news.rows) changed.add(id)
    refresh()
  })
}
