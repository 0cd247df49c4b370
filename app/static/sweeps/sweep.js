// A sweep's page: fetched again, with its charts, after each change.
import { createPanelMenu } from 'chart_menu'
import { fittedPlot } from 'charts'
import { inTurn, insisted, pause } from 'http'
import { follow } from 'live'
import { root } from 'root'
import { show } from 'rows'
import { still } from 'dom_updates'
import { settingFigure, settingsFigure, trialsFigure } from 'trials'

/** Fetching and drawing may take this share of the time, and comes no oftener than that. */
const [SHARE, LEAST_MS] = [0.2, 500]
/** Lines through the settings: of more runs the best. */
const LINES = 50
const FRAGMENTS = ['status', 'actions', 'menu', 'facts', 'metrics', 'trials', 'trial_count', 'paging']

const article = document.querySelector('[data-sweep]')
const { sweep, metric, goal } = article.dataset
const settings = JSON.parse(article.dataset.settings)
const fragment = (root, name) => root.querySelector(`[data-fragment=${name}]`)

/** A click at a dot opens its run. */
const opening = {
  plotly_click: ({ points: [{ customdata }] }) => {
    if (customdata) location.assign(`${root}/runs/${customdata}`)
  },
}
const byRun = fittedPlot(article.querySelector('[data-trials-plot]'), trialsFigure, opening)
const parallelPlot = fittedPlot(article.querySelector('[data-parallel-plot]'), settingsFigure)
const bySetting = [...article.querySelectorAll('[data-setting-plot]')].map((plot) => ({
  path: plot.dataset.settingPlot,
  plot: fittedPlot(plot, settingFigure, opening),
}))
/** Plots by name of the panel. @type {Map<string, any>} */
const plots = new Map([
  ['best', byRun],
  ['parallel', parallelPlot],
  ...bySetting.map(({ plot }, i) => /** @type {[string, any]} */ ([`setting-${i + 1}`, plot])),
])
createPanelMenu(article, `sweep ${sweep}`, {
  panelOf: (row) => {
    const element = article.querySelector(`[data-row="${row}"]`)
    return { row: {}, element, drawn: { lines: element.querySelector('.plot').data ?? [] } }
  },
  mode: () => 'x',
  picture: (file, format, row) => plots.get(row)?.savePicture(file, {}, format),
})

const fetchWords = async () => {
  const page = await (await insisted(location.href)).text()
  const fresh = new DOMParser().parseFromString(page, 'text/html')
  still(() => {
    for (const name of FRAGMENTS) show(fragment(article, name), fragment(fresh, name).innerHTML)
  })
}

const draw = async () => {
  const { trials } = await (await insisted(`${root}/api/v1/sweeps/${sweep}/trials?sort=value&limit=1000`)).json()
  byRun.draw({ trials: trials.toSorted((a, b) => a.number - b.number), metric, goal })
  for (const { path, plot } of bySetting) plot.draw({ trials, path, goal })
  const shown = trials.filter(({ state }) => state === 'complete').slice(0, LINES)
  const columns = new Map(settings.map((path) => [path, shown.map(({ params }) => params[path] ?? 'off')]))
  columns.set(
    metric,
    shown.map(({ value }) => value),
  )
  const labels = Object.fromEntries(shown.map(({ run_id, name }) => [run_id, name]))
  parallelPlot.draw({ ids: shown.map(({ run_id }) => run_id), labels, columns, settings, up: metric })
}

let isFirst = true
const refresh = inTurn(async () => {
  const start = performance.now()
  await Promise.all([isFirst ? null : fetchWords(), draw()])
  isFirst = false
  await pause(Math.max((performance.now() - start) * (1 / SHARE - 1), LEAST_MS))
})

refresh()
follow(`${root}/api/v1/sweeps/${sweep}/live`, article.dataset.cursor, refresh)
