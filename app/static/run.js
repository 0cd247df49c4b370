// The page of a run: numbers, charts, log and fragments, kept up to date by the live stream.
import { previewTexts } from 'artifacts'
import { createCharts } from 'charts'
import { count } from 'formats'
import { createGradients } from 'gradients'
import { watch } from 'live'
import { createLog } from 'log'
import { Points } from 'points'
import { show } from 'rows'
import { readView, writeView } from 'view'

const article = document.querySelector('[data-run]')
const section = article.querySelector('[data-charts]')
const api = `/api/runs/${article.dataset.run}`
const fetched = async (path) => (await fetch(`${api}/${path}`)).json()
/** An overview that live steps made so long is fetched anew. */
const POINTS_KEPT = 10000

const view = readView()
const log = createLog(article.querySelector('[data-log]'), api)
const [page, flagged, metrics] = await Promise.all(['series', 'flagged', 'metrics'].map(fetched))
const points = new Points(page, flagged, metrics)
const charts = createCharts(section.querySelector('[data-plot]'), {
  scaled: section.dataset.precision === 'fp16',
  onRange: (range) => { view.range = range; changeView() },
})

const draw = () => {
  const skips = points.skips.length
  section.querySelector('[data-skip-count]').textContent = `${count(skips)} skipped ${skips === 1 ? 'step' : 'steps'}`
  section.querySelector('[data-point-count]').textContent = `${count(points.count)} of ${count(points.total)} points`
  charts.draw(points, view)
}

/** A zoom into thinned points fetches the raw ones. */
const refetch = async () => {
  if (points.bucket === 1 && points.count <= POINTS_KEPT) return
  const [first, last] = view.range ? points.steps(view.range, view.x) : [1, null]
  const query = new URLSearchParams({ first: String(Math.max(1, Math.floor(first))) })
  if (last !== null) query.set('last', String(Math.max(1, Math.ceil(last))))
  points.setPage(await fetched(`series?${query}`))
}

const changeView = async () => {
  writeView(view)
  section.querySelector('[data-smooth]').textContent = String(view.smooth)
  section.querySelector('[data-reset-zoom]').hidden = !view.range
  await refetch()
  draw()
}

for (const input of section.querySelectorAll('[data-view]')) {
  const name = input.dataset.view
  if (input.type === 'radio') input.checked = view[name] === input.value
  else input.value = view[name]
  input.addEventListener('input', () => {
    view[name] = input.type === 'range' ? Number(input.value) : input.value
    if (name === 'x') view.range = null // the same numbers would mean another stretch
    changeView()
  })
}
section.querySelector('[data-reset-zoom]').addEventListener('click', charts.resetZoom)
section.querySelector('[data-full-screen]').addEventListener('click', () => section.requestFullscreen())
section.querySelector('[data-png]').addEventListener('click', () => charts.savePicture(`run${article.dataset.run}`))
changeView()
previewTexts(article)
const gradients = createGradients(article.querySelector('[data-gradients]'), api)

const title = document.title
if (article.dataset.over === 'false') {
  watch(`${api}/live`, article.dataset.cursor, (news) => {
    article.dataset.status = news.run.status
    for (const [name, html] of Object.entries(news.fragments)) {
      show(article.querySelector(`[data-fragment=${name}]`), html)
    }
    document.title = news.run.status === 'running' ? `${Math.floor(100 * news.run.step / news.run.steps_total)} % ${title}` : title
    previewTexts(article)
    if (news.has_histograms) gradients.refresh()
    log.add(news.log)
    points.addMetrics(news.metrics)
    if (news.steps) points.addSteps(news.steps)
    if (points.count > POINTS_KEPT && !view.range) refetch().then(draw)
    else draw()
  })
}
