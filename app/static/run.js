// The page of a run: numbers, charts, log and fragments, kept up to date by the live stream.
import { fetched, insisted, pause } from 'answers'
import { previewTexts } from 'artifacts'
import { createCharts } from 'charts'
import { count, size } from 'formats'
import { createGradients } from 'gradients'
import { createHeadroom } from 'headroom'
import { createLayers } from 'layers'
import { createLabels } from 'labels'
import { follow } from 'live'
import { createLog } from 'log'
import { toNewest } from 'newest'
import { Points } from 'points'
import { mergeRows, show } from 'rows'
import { still } from 'still'
import { createSystem } from 'system'
import { readView, writeView } from 'view'

const article = document.querySelector('[data-run]')
const section = article.querySelector('[data-charts]')
const api = `/api/v1/runs/${article.dataset.run}`
/** An overview that live steps made so long is fetched anew. */
const POINTS_KEPT = 10000
/** Parts of the news that this page makes something of: events and files come as rows of its tables. */
const SHOWN = 'steps,metrics,log,fragments'

const view = readView()
// Steps that were retried in fp32 are both skipped and applied: such a run has no axis of the latter.
if (!section.querySelector(`[data-view=x][value=${view.x}]`)) Object.assign(view, { x: 'step', range: null })
const log = createLog(article.querySelector('[data-log]'), api)
const points = new Points(await (await insisted(`${api}/series`)).json())
let newest = points.last // step that is known
let skipped = Number(article.dataset.skipped)
const charts = createCharts(section.querySelector('[data-plot]'), {
  scaled: section.dataset.scaled !== undefined,
  timed: section.dataset.timed !== undefined,
  onZoom: (x, rows) => {
    if (x !== undefined) view.range = x
    for (const [name, range] of Object.entries(rows)) {
      if (range) view.rows[name] = range
      else delete view.rows[name]
    }
    changeView()
  },
  onDraw: () => showCounts(), // with the lines: each change by itself would lay out the page
})

const showCounts = () => {
  const steps = `${count(skipped)} skipped ${skipped === 1 ? 'step' : 'steps'}`
  const inView = view.range ? `${count(points.countSkips(points.steps(view.range, view.x)))} in view, of ` : ''
  const note = section.querySelector('[data-skip-count]')
  note.textContent = inView + steps
  note.classList.toggle('some', skipped > 0)
  section.querySelector('[data-point-count]').textContent = `${count(points.count)} of ${count(points.total)} points`
}
const draw = () => charts.draw(points, view)

let [fetches, answered] = [0, 0]
/** Steps that came by news while a fetch was under way. @type {Record<string, any[]>[]} */
const heard = []
let isOutdated = false // by steps that ran again, or too long; until a page came
/** A zoom into buckets fetches finer ones or raw steps; back from it, the whole. */
const refetch = async () => {
  const number = ++fetches // what an earlier one still fetches is of no use
  const range = view.range ? points.steps(view.range, view.x) : null
  const has = range ? points.hasAll(range) : points.isWhole
  if (has && !isOutdated && points.count <= POINTS_KEPT) {
    answered = number
    return
  }
  /** @type {[number, number]} */
  const asked = range ? [Math.max(1, Math.floor(range[0])), Math.max(1, Math.ceil(range[1]))] : [1, Infinity]
  const query = new URLSearchParams({ first: String(asked[0]), ...(range ? { last: String(asked[1]) } : {}) })
  let page = null
  while (!page) {
    heard.length = 0
    try {
      page = await (await fetched(`${api}/series?${query}`)).json()
    } catch {
      draw() // what is here meanwhile
      await pause()
    }
    if (number !== fetches) return
  }
  points.setPage(page, asked)
  for (const steps of heard) points.addSteps(steps) // which the page may be too old to hold
  answered = number
  isOutdated = false
}

/** @type {Promise<void>|null} */
let renewing = null
/** One after another: a slow answer is not asked for again meanwhile. */
const renew = () => {
  isOutdated = true
  renewing ??= refetch().then(draw).finally(() => { renewing = null })
}

const showView = () => {
  writeView(view)
  section.querySelector('[data-smooth]').textContent = String(view.smooth)
  section.querySelector('[data-reset-zoom]').hidden = !view.range && !Object.keys(view.rows).length
}
const changeView = async () => {
  showView()
  await refetch()
  draw()
}

for (const input of section.querySelectorAll('[data-view]')) {
  const name = input.dataset.view
  if (input.type === 'radio') input.checked = view[name] === input.value
  else input.value = view[name]
  input.addEventListener('input', () => {
    view[name] = input.type === 'range' ? Number(input.value) : input.value
    // The same numbers would mean another stretch.
    if (name === 'x') view.range = null
    if (name === 'loss') delete view.rows.loss
    if (name === 'x') return changeView()
    showView() // the same numbers, drawn in another way
    draw()
  })
}
section.querySelector('[data-reset-zoom]').addEventListener('click', () => {
  view.range = null
  view.rows = {}
  changeView()
})
section.querySelector('[data-full-screen]').addEventListener('click', () => section.requestFullscreen())
section.querySelector('[data-png]').addEventListener('click', () => charts.savePicture(`run${article.dataset.run}`))
changeView()
previewTexts(article)
toNewest(article)
const tellLabels = createLabels(article, api)
const gradientSection = article.querySelector('[data-gradients]')
const gradients = gradientSection && createGradients(gradientSection, api)
const layerSection = article.querySelector('[data-layers]')
const layers = layerSection && createLayers(layerSection, api)
const headroomSection = article.querySelector('[data-headroom]')
const headroom = headroomSection && createHeadroom(headroomSection, api)
const system = createSystem(article.querySelector('[data-system]'), api)

/** Words are for reading, and each change of them lays out the page: so often at most. */
const WORDS_MS = 500
const title = document.title
/** The run, the fragments and the changed rows to show next. @type {{run: any, fragments: Record<string, string>, rows: [string, any][]}|null} */
let words = null
let isReading = false
const showWords = () => {
  if (words && !isReading) still(replaceWords)
}
const replaceWords = () => {
  if (!words) return
  const { run, fragments, rows } = words
  words = null
  article.dataset.status = run.status
  article.querySelector('[data-stored]').textContent = size(run.stored_bytes)
  for (const [name, html] of Object.entries(fragments)) {
    show(article.querySelector(`[data-fragment=${name}]`), html)
  }
  for (const [name, changed] of rows) mergeRows(article.querySelector(`[data-fragment=${name}]`), changed)
  document.title = run.status === 'running' && run.steps_total ? `${Math.floor(100 * run.step / run.steps_total)} % ${title}` : title
  previewTexts(article)
  toNewest(article)
  isReading = true
  setTimeout(() => { isReading = false; showWords() }, WORDS_MS)
}

if (article.dataset.over === 'false') {
  follow(`${api}/live`, article.dataset.cursor, (news) => {
    if (!news.run) return // it is over, and all was told
    words = {
      run: news.run,
      fragments: { ...words?.fragments, ...news.fragments },
      rows: [...(words?.rows ?? []).filter(([name]) => !(name in news.fragments)), ...Object.entries(news.rows)],
    }
    showWords()
    tellLabels(news.labels)
    if (news.diagnosed.includes('histogram')) gradients?.refresh()
    if (news.diagnosed.includes('layer_norms')) layers?.refresh()
    if (news.diagnosed.includes('headroom')) headroom?.refresh()
    system.refresh()
    if (news.log.length) still(() => log.add(news.log)) // measuring where the end is lays out the page
    skipped = news.run.skipped
    points.resumptions = news.resumptions
    points.addMetrics(news.metrics)
    if (news.spikes) points.spikes = news.spikes
    if (!news.steps) return draw()
    // After a resume steps run again, and a bucket cannot be cut.
    const runsAgain = points.bucket > 1 && news.steps.step[0] <= newest
    newest = news.steps.step.at(-1)
    if (answered !== fetches) heard.push(news.steps)
    points.addSteps(news.steps)
    draw()
    if (runsAgain || points.count > POINTS_KEPT) renew()
  }, { parts: SHOWN })
}
