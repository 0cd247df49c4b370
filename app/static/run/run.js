// The page of a run: its tabs, what each of them shows, and updates of them by the live stream.
import { createConfiguration } from 'config_values'
import { size } from 'formats'
import { createEnvironment } from 'environment'
import { createGradients } from 'gradients'
import { createGradientsTab } from 'gradients_tab'
import { createHeadroom } from 'headroom'
import { createLayers } from 'layers'
import { createLabels } from 'metadata'
import { showDamageOf } from 'http'
import { follow, revisionOf } from 'live'
import { createLog } from 'log'
import { createMedia } from 'media'
import { createMetricTable } from 'metric_table'
import { createReplays } from 'replays'
import { root } from 'root'
import { mergeRows, show } from 'rows'
import { createSeries } from 'series'
import { showNews } from 'snapshots'
import { createSystem } from 'system'
import { createTabs } from 'tabs'
import { readView, writeView } from 'url_state'
import { createPrecisionDiff } from 'precision_diff'

const article = document.querySelector('[data-run]')
const api = `${root}/api/v1/runs/${article.dataset.run}`
showDamageOf(`${root}/api/v1`, article.dataset.run)
/** Parts of the updates that this page makes something of: events and files come as rows of its tables. */
const [SHOWN, CHARTED, LOADING] = [
  'log,fragments',
  'log,fragments,steps,metrics',
  'log,fragments,steps,metrics,first_charts',
]
const FIRST_TAB = 'charts' // which the address does not name

const view = readView(article)
const further = { tab: '', hide: view.hidden, setting: '', changed: '' }
const log = createLog(article.querySelector('[data-log]'), api)
const series = createSeries(article.querySelector('[data-charts]'), api, {
  name: `run${article.dataset.run}`,
  recipe: article.dataset.recipe,
  skipped: Number(article.dataset.skipped),
  revision: article.dataset.over === 'false' ? revisionOf(article.dataset.cursor) : Infinity,
  view,
  onView: () => writeView(view, Object.assign(further, { hide: view.hidden })),
  onMetrics: () => ask(asked),
})
createConfiguration(article.querySelector('[data-configuration]'), (kept) => {
  Object.assign(further, kept)
  writeView(view, further)
})
const replays = createReplays(article.querySelector('[data-fragment=skips]'), document.querySelector('form#replay'))
const environment = createEnvironment(article.querySelector('[data-fragment=environment]'), api)
const precisionDiff = createPrecisionDiff(article.querySelector('[data-diff]'))
createGradientsTab(article.querySelector('[data-panel=gradients]'))
const system = createSystem(article.querySelector('[data-system]'), api)
/**
 * Figures of the diagnosis, by what the updates call them.
 * @type {[string, (section: Found, api: string) => {refresh: () => unknown}][]}
 */
const FIGURES = [
  ['histogram', createGradients],
  ['layer_norms', createLayers],
  ['headroom', createHeadroom],
]
/** Figures that have been shown. @type {Map<string, {refresh: () => unknown}>} */
const figures = new Map()
/** Figures with updates while they were hidden. @type {Set<string>} */
const missed = new Set()
/** @type {{ask: (query: Record<string, string|string[]>) => void}|null} */
let stream = null
let isCharted = false
let asked = SHOWN
const metricTable = createMetricTable(article, view, series, () => ask(asked))
/** Return the stream's parameters. @param {string} parts @returns {Record<string, string|string[]>} */
const queryOf = (parts) => {
  const metrics = series.metricQuery()
  return { parts, ...metrics, ...('metric' in metrics && metricTable.query()) }
}
let query = queryOf(asked)
/** @param {string} parts */
const ask = (parts) => {
  asked = parts
  const wanted = queryOf(parts)
  if (JSON.stringify(wanted) === JSON.stringify(query)) return
  query = wanted
  stream?.ask(query)
}

/** Show the toolbar of a run without steps from its first panel on. */
const showToolbar = () => {
  const nothing = article.querySelector('[data-no-points]')
  if (!nothing || !article.querySelector('[data-charts] .chart-panel')) return
  nothing.hidden = true
  article.querySelector('[data-charts] .toolbar').hidden = false
}

const media = createMedia(
  article.querySelector('[data-media]'),
  article.querySelector('[data-fragment=artifacts]'),
  (count) => {
    article.querySelector('[data-tab=media]').hidden = !count
    article.querySelector('[data-media-count]').textContent = count ? String(count) : ''
  },
)
media.refresh()
/** Functions that fetch and draw a tab's contents when it is shown. @type {Record<string, () => void>} */
const onShow = {
  charts: () => {
    if (isCharted) return
    isCharted = true
    // First, so that nothing is lost between the two.
    ask(article.querySelector('[data-static-chart]') ? LOADING : CHARTED)
    series.show().then(() => {
      ask(CHARTED)
      showToolbar()
    })
  },
  gradients: () => {
    for (const [kind, create] of FIGURES) {
      const section = article.querySelector(`.chart-panel[data-diagnosis=${kind}]`)
      if (section && !figures.has(kind)) figures.set(kind, create(section, api))
      else if (missed.has(kind)) figures.get(kind)?.refresh()
    }
    missed.clear()
  },
  media: () => media.show(),
  log: () => log.show(),
}
createTabs(article, (name) => {
  further.tab = name === FIRST_TAB ? '' : name
  writeView(view, further)
  onShow[name]?.()
})
const showLabels = createLabels(article, api)

/** Show the precision, which is unknown until a script's first step. @param {string} precision */
const showPrecision = (precision) => {
  const part = document.querySelector('[data-precision]')
  part.hidden = !precision
  part.querySelector('b').textContent = precision
}

const title = document.title
/** Messages that are not shown yet. @type {any[]} */
let messages = []
/** Show a newer moment of the run in every part of the page. @param {number} revision of the last of the messages */
const showMessages = (revision) => {
  const received = messages
  messages = []
  series.add(received, revision)
  if (!received.length) return
  const { run, labels } = received[received.length - 1]
  article.dataset.status = run.status
  showPrecision(run.precision)
  if (run.step) for (const part of article.querySelectorAll('[data-of-steps]')) part.hidden = false
  showToolbar()
  article.querySelector('[data-stored]').textContent = size(run.stored_bytes)
  const fragments = Object.assign({}, ...received.map((message) => message.fragments))
  for (const [name, html] of Object.entries(fragments)) {
    const box = article.querySelector(`[data-fragment=${name}]`)
    if (name === 'environment') environment.show(html)
    else if (box) show(box, html) // a measurement has no figures of a training
  }
  received.forEach(({ rows }, i) => {
    for (const [name, changed] of Object.entries(rows)) {
      const isReplaced = received.slice(i).some((message) => name in message.fragments)
      if (name === 'metrics') metricTable.merge(changed)
      else if (!isReplaced) mergeRows(article.querySelector(`[data-fragment=${name}]`), changed)
    }
  })
  replays.show()
  document.title =
    run.status === 'running' && run.steps_total ? `${Math.floor((100 * run.step) / run.steps_total)} % ${title}` : title
  media.refresh()
  showLabels(labels)
  received.flatMap((message) => message.diagnosed).forEach(diagnosed)
  system.refresh()
  const lines = received.flatMap((message) => message.log)
  if (lines.length) log.add(lines)
}

/** @param {string} kind of diagnosis */
const diagnosed = (kind) => {
  if (kind === 'precision_diff') precisionDiff.refresh()
  if (article.querySelector('[data-panel=gradients]').dataset.shown === undefined) missed.add(kind)
  else figures.get(kind)?.refresh()
}

if (article.dataset.over === 'false') {
  /** Messages of a moment. @type {any[]} */
  const parts = []
  let revision = revisionOf(article.dataset.cursor)
  const showNewest = () => showMessages(revision)
  stream = follow(
    `${api}/live`,
    article.dataset.cursor,
    (message, cursor) => {
      if (message.run) parts.push(message) // else it is over, and everything was received
      const reached = message.is_over ? Infinity : revisionOf(cursor)
      if (reached < 0) return // the rest comes at once
      messages.push(...parts.splice(0))
      revision = reached
      showNews(showNewest)
    },
    query,
  )
}
