// Charts of a run: numbers, fetched when visible, and the bar above.
import { fetched, insisted, inTurn, pause } from 'http'
import { createPanelMenu } from 'chart_menu'
import { arrangementOf } from 'chart_preferences'
import { library } from 'charts'
import { lossesOf } from 'figure'
import { isFound } from 'find_setting'
import { count } from 'formats'
import { revisionOf } from 'live'
import { isZoomed, resetZoom, takeAxes } from 'panel_axes'
import { createPanels } from 'panels'
import { METRIC, Points } from 'points'
import { createStarting } from 'empty_state'
import { createToolbar } from 'toolbar'

/** Points of an overview above which it is fetched again. */
const POINTS_KEPT = 10000
/** Metrics whose points come all with the first answer; of more, only of those in view. */
const FEW = 100
/** Limits of a URL: metrics in view, and their characters. */
const [MOST_NAMED, MOST_CHARACTERS] = [100, 6000]
/** Metrics that have panels. */
const MOST_PANELS = 10000
/** Metrics among which no search is needed. */
const UNSEARCHED = 10
/** While panels come into view one after another, their points are fetched after a pause of this. */
const SCROLLING_MS = 100

/**
 * @param {HTMLElement} section
 * @param {string} api address of the run
 * @param {{
 *   name: string,
 *   recipe: string,
 *   skipped: number,
 *   revision?: number,
 *   view: import('url_state').View,
 *   onView: () => void,
 *   onMetrics?: () => void
 * }} options name: of pictures; skipped: steps so far; revision: that the page shows, of a run that goes on; onView:
 *   the view has changed; onMetrics: others are shown
 */
export const createSeries = (
  section,
  api,
  { name, recipe, skipped, revision = Infinity, view, onView, onMetrics = () => {} },
) => {
  // Steps that were retried in fp32 are both skipped and applied: such a run has no axis of the latter.
  if (!section.querySelector(`[data-view=x][value="${CSS.escape(view.x)}"]`))
    Object.assign(view, { x: 'step', range: null })
  /** Undefined until they were requested. @type {Points} */
  let points
  let newest = 0 // step that is known
  let isAsked = false
  /** News that came before the first answer. @type {any[]} */
  const early = []
  /** Answers that are newer than the rest of the page. @type {{revision: number, take: () => void}[]} */
  let ahead = []
  /**
   * Take an answer once all of the page is as new.
   * @param {string} cursor of the answer
   * @param {() => void} take
   * @returns {Promise<void>}
   */
  const onceReached = (cursor, take) =>
    new Promise((resolve) => {
      ahead.push({
        revision: revisionOf(cursor),
        take: () => {
          take()
          resolve()
        },
      })
      takeAnswers()
    })
  const takeAnswers = () => {
    const reached = ahead.filter((answer) => answer.revision <= revision)
    ahead = ahead.filter((answer) => answer.revision > revision)
    for (const { take } of reached) take()
  }
  const { arrangement, keep } = arrangementOf(section, recipe)
  const { pinned, collapsed } = arrangement
  Object.assign(view, { pinned, collapsed })
  takeAxes(view, arrangement)
  const toolbar = createToolbar(section, view, arrangement, {
    onArrange: keep,
    onChange: (field) => {
      if (field === 'x') return changeView()
      showView() // the same numbers, drawn in another way
      draw()
    },
  })
  const known = {
    scaled: section.dataset.scaled !== undefined,
    proven: section.dataset.scaled === 'yes',
    onlyMetrics: section.dataset.onlyMetrics !== undefined,
    examples: Number(section.dataset.examples ?? 0),
  }
  const panels = createPanels(section, {
    known,
    view,
    onZoom: (x, rows) => {
      if (x !== undefined) view.range = x
      for (const [row, range] of Object.entries(rows)) {
        if (range) view.rows[row] = range
        else delete view.rows[row]
      }
      changeView()
    },
    onHide: (hidden) => {
      view.hidden = hidden
      showView()
      draw()
    },
    onFold: (group, isFolded) => {
      if (arrangement.collapsed.includes(group) === isFolded) return // a new group opens
      const others = arrangement.collapsed.filter((each) => each !== group)
      arrangement.collapsed.splice(0, Infinity, ...others, ...(isFolded ? [group] : []))
      keep()
    },
    arrangement,
    onArrange: keep,
    onSeen: () => {
      clearTimeout(scrolling)
      const now = performance.now()
      scrolling = setTimeout(want, now - seenAt > SCROLLING_MS ? 0 : SCROLLING_MS)
      seenAt = now
    },
  })
  createPanelMenu(
    section,
    name,
    {
      panelOf: panels.panelOf,
      mode: () => view.x,
      picture: panels.savePicture,
      view,
      onAxis: () => {
        showView()
        draw()
      },
    },
    arrangement,
    () => {
      keep()
      draw()
    },
  )
  const starting = createStarting(section)

  let [scrolling, seenAt] = [0, -Infinity]
  /** Names of all metrics, also of those beyond MOST_PANELS. */
  let total = Number(section.dataset.metrics)
  const isPartial = () => total > FEW || Boolean(view.search)
  /** Metrics whose points are shown. @returns {string[]} */
  const wanted = () => {
    if (!isPartial()) return [...points.names]
    const axis = view.x.startsWith(METRIC) ? [view.x.slice(METRIC.length)] : []
    let characters = 0
    return [...new Set([...axis, ...(points ? [...lossesOf(points.names), ...panels.seen()] : [])])]
      .slice(0, MOST_NAMED)
      .filter((each) => (characters += encodeURIComponent(each).length) < MOST_CHARACTERS)
  }
  /** Have the points of the metrics that are shown, and of no others. */
  const want = inTurn(async () => {
    if (!points) return
    onMetrics() // first, so that nothing is lost between the two
    const names = new Set(wanted())
    for (const name of points.metrics.keys()) if (!names.has(name)) points.metrics.delete(name)
    const missing = [...names].filter((name) => !points.metrics.has(name))
    if (!missing.length) return
    const { asked } = points
    const query = new URLSearchParams({
      first: String(asked[0]),
      ...(asked[1] < Infinity && { last: String(asked[1]) }),
    })
    for (const name of missing) query.append('metric', name)
    receivedMetrics.length = 0
    const { metrics, cursor } = await (await insisted(`${api}/metrics/series?${query}`)).json()
    await onceReached(cursor, () => {
      if (points.asked === asked) points.setMetrics(metrics)
      else want() // zoomed meanwhile
      // Which the answer may be too old to hold.
      points.addMetrics(receivedMetrics.flat().filter(({ name }) => name in metrics))
      draw()
    })
  })
  /** Points of metrics that came while those before them were fetched. @type {any[][]} */
  const receivedMetrics = []
  /** @returns {Promise<Set<string>>} */
  const fetchNames = async () => {
    const names = []
    for (let after = ''; after !== null && names.length < MOST_PANELS;) {
      const page = await (await insisted(`${api}/metrics/names?${new URLSearchParams({ after })}`)).json()
      names.push(...page.names)
      total = page.total
      after = page.next
    }
    return new Set(names)
  }
  const renewNames = inTurn(async () => {
    points.names = await fetchNames()
    draw()
    want()
  })

  const bar = section.querySelector('[data-metric-search]') // of few metrics a read-only link has none
  const showMetrics = () => {
    if (!bar) return
    const all = `${count(total)} ${total === 1 ? 'metric' : 'metrics'}`
    const { search } = view
    const matching = search ? [...points.names].filter((name) => isFound(search, name)).length : 0
    const found = search ? `${count(matching)} of ` : ''
    bar.querySelector('[data-metric-count]').textContent =
      found + all + (points.names.size < total ? `; panels of the first ${count(points.names.size)}` : '')
    bar.hidden = total <= UNSEARCHED && !view.search
    bar.querySelector('[data-fold]').textContent = section.querySelector(
      '.panel-group:not([open], [data-group=pinned])',
    )
      ? 'Unfold all'
      : 'Fold all'
  }
  bar?.addEventListener('input', ({ target }) => {
    view.search = target.value.trim()
    showView()
    draw()
    if (view.search) bar.scrollIntoView() // what was found is below
    want()
  })
  bar?.addEventListener('submit', (event) => event.preventDefault())
  bar
    ?.querySelector('[data-fold]')
    .addEventListener('click', ({ target }) => panels.fold(target.textContent === 'Fold all'))
  section.addEventListener(
    'toggle',
    () => {
      if (points) showMetrics()
    },
    true,
  )

  const showCounts = () => {
    const steps = `${count(skipped)} skipped ${skipped === 1 ? 'step' : 'steps'}`
    const inView = view.range ? `${count(points.countSkips(points.steps(view.range, view.x)))} in view, of ` : ''
    const note = section.querySelector('[data-skip-count]')
    note.textContent = inView + steps
    note.classList.toggle('some', skipped > 0)
    section.querySelector('[data-point-count]').textContent = `${count(points.count)} of ${count(points.total)} points`
  }
  const draw = () => {
    if (!points) return
    showCounts()
    panels.draw(points)
    showMetrics()
  }

  /** Which metrics the charts draw, as the API is asked for them. @returns {Record<string, string|string[]>} */
  const metricQuery = () => (isPartial() ? { metric_limit: '0', metric: wanted() } : {})
  /** A query for what the charts draw. @param {Record<string, string>} more */
  const queryOf = (more) => {
    const query = new URLSearchParams(more)
    for (const [name, value] of Object.entries(metricQuery()))
      for (const each of [value].flat()) query.append(name, each)
    return query
  }

  let [fetches, answered] = [0, 0]
  /** Messages that came while a fetch was under way. @type {any[]} */
  const received = []
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
    const query = queryOf({ first: String(asked[0]), ...(range ? { last: String(asked[1]) } : {}) })
    /** @type {any} */
    let page = null
    while (!page) {
      received.length = 0
      try {
        page = await (await fetched(`${api}/series?${query}`)).json()
      } catch {
        draw() // what is here meanwhile
        await pause()
      }
      if (number !== fetches) return
    }
    await onceReached(page.cursor, () => {
      if (number !== fetches) return
      points.setPage(page, asked)
      received.forEach(add) // which the page may be too old to hold
      answered = number
      isOutdated = false
      draw()
    })
  }

  /** @type {Promise<void>|null} */
  let renewing = null
  /** One after another: a slow answer is not asked for again meanwhile. */
  const renew = () => {
    isOutdated = true
    renewing ??= refetch().finally(() => {
      renewing = null
    })
  }

  const showView = () => {
    onView()
    toolbar.show()
    section.querySelector('[data-reset-zoom]').hidden = !isZoomed(view, arrangement)
  }
  const changeView = async () => {
    showView()
    if (!points) return
    draw() // all panels at once, with what is here
    await Promise.all([refetch(), want()])
    draw()
  }

  toolbar.show()
  section.querySelector('[data-reset-zoom]').addEventListener('click', () => {
    resetZoom(view, arrangement)
    changeView()
  })

  const add = ({ steps, metrics = [] }) => {
    points.addMetrics(isPartial() ? metrics.filter(({ name }) => points.names.has(name)) : metrics)
    if (steps) points.addSteps(steps)
  }
  const take = (message) => {
    points.resumptions = message.resumptions
    if (message.spikes) points.spikes = message.spikes
    receivedMetrics.push(message.metrics ?? [])
    if (answered !== fetches) received.push(message)
    add(message)
    if (!isPartial()) total = points.names.size
    if (message.metric_names > total) renewNames()
    if (message.has_all_metrics === false) {
      points.expireMetrics()
      renew()
    }
    if (!message.steps) return
    // After a resume steps run again, and a bucket cannot be cut.
    const runsAgain = points.bucket > 1 && message.steps.step[0] <= newest
    newest = message.steps.step.at(-1)
    if (runsAgain || points.count > POINTS_KEPT) renew()
  }

  return {
    metricQuery,
    onceReached,
    /** Fetch and draw, once; returns when there is something to draw. */
    show: async () => {
      if (isAsked) return
      isAsked = true
      const names = isPartial() ? fetchNames() : null
      const answer = insisted(`${api}/series?${queryOf({})}`)
      await library()
      const page = await (await answer).json()
      const known = await names
      return onceReached(page.cursor, () => {
        points = new Points(page)
        newest = points.last
        if (known) points.names = known
        total = Math.max(total, points.names.size)
        early.forEach(take)
        starting.show({ status: section.closest('[data-run]').dataset.status, step: points.end || total })
        changeView()
      })
    },
    /** @param {any[]} messages of the run, in order @param {number} reached revision of the run after these */
    add: (messages, reached) => {
      revision = reached
      for (const message of messages) {
        skipped = message.run.skipped
        // Unknown on a page that was opened before the run began.
        const { examples_per_second: examples, steps_per_second: steps } = message.run
        if (!known.examples && examples && steps) known.examples = Math.round(examples / steps)
        if (points) take(message)
        else if (isAsked) early.push(message)
        starting.show({ status: message.run.status, step: message.run.step || points?.end || 0 })
      }
      takeAnswers()
      draw()
    },
  }
}
