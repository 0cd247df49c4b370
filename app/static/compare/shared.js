// A run as a read-only link shows it: its charts and its configuration, as of when the page was made.
import { createConfiguration } from 'config_values'
import { createMetricTable } from 'metric_table'
import { createSeries } from 'series'
import { createTabs } from 'tabs'
import { readView, writeView } from 'url_state'

const article = document.querySelector('[data-run]')
const view = readView(article)
const further = { tab: '', hide: view.hidden, setting: '', changed: '' }
const series = createSeries(article.querySelector('[data-charts]'), article.dataset.api, {
  name: `run${article.dataset.run}`,
  recipe: article.dataset.recipe,
  skipped: Number(article.dataset.skipped),
  view,
  onView: () => writeView(view, Object.assign(further, { hide: view.hidden })),
})
createConfiguration(article.querySelector('[data-configuration]'), (kept) => {
  Object.assign(further, kept)
  writeView(view, further)
})
createMetricTable(article, view, series)
createTabs(article, (name) => {
  if (name === 'charts') series.show()
})
