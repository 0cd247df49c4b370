// The panels of a run's charts: one figure each, in groups that fold, with a legend of values. Those that are out of
// view are a title only.
import { NONFINITE_SIGNS } from 'annotations'
import { painter, savePicture, zoomed } from 'charts'
import { place, pointedAt, snapped, valueAt } from 'crosshair'
import { figure, GROUPS, rowsOf } from 'figure'
import { isFound } from 'find_setting'
import { still } from 'dom_updates'
import { createLayout } from 'panel_layout'

/** Header, plot and handles of a panel. @typedef {{parts: Found[], plot: Found, draw: () => void}} Shell */
/**
 * row: what it shows. shell: while it is in view. drawn: its figure.
 * @typedef {{element: Found, row: import('figure').Row, shell: Shell|null, drawn: any}} Panel
 */

/** @param {string} tag @param {Record<string, any>} [fields] @param {(Node|string)[]} children @returns {any} */
const made = (tag, fields = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), fields)
  element.append(...children)
  return element
}

/** @param {string} group */
const titleOf = (group) => GROUPS[group] ?? (group === '/' ? 'Metrics' : group.slice(0, -1))

/** Return the title of a panel without that of its group. @param {import('figure').Row} row */
const headOf = ({ title, group, head }) =>
  group !== '/' && group.endsWith('/') && title.startsWith(group) ? title.slice(group.length) : (group && head) || title

/** The last words of a title, which stay where it is too long: titles of related metrics differ at the end. */
const TAIL = /(?<=.{8}[-_/.\s]).{1,12}$/

/** Return the title of a panel, of which all but the last words give way. @param {import('figure').Row} row */
const titled = (row) => {
  const head = headOf(row)
  const at = head.search(TAIL)
  const parts =
    at < 0
      ? [head]
      : [made('span', { className: 'cut', textContent: head.slice(0, at) }), made('span', {}, head.slice(at))]
  return made('h3', { title: row.title }, ...parts)
}

/** The name of a line, without the title of its panel. @param {string} name @param {import('figure').Row} row */
const shortened = (name, { title }) => (name.startsWith(title) ? name.slice(title.length).replace(', ', '') : name)

/** Panels of the groups that are open until the user unfolds others; on a phone they stand one below the other. */
const OPEN = innerWidth < 640 ? 30 : 60
/** Pixels of a plot below which a legend of several lines has no names, which would hide values. */
const NARROW = 400
/**
 * Return a short name of a line in a narrow panel: "before" of "before clipping".
 * @param {string} name
 * @param {import('figure').Row} row
 */
const briefly = (name, row) => shortened(name, row).split(' ')[0]
/**
 * Sign and meaning of marks of single steps, with a class if they are not red.
 * @type {Record<string, [string, string, string?]>}
 */
const SIGNS = {
  skipped: ['|', 'skipped step'],
  'loss spike': ['◆', 'loss spike'],
  ...NONFINITE_SIGNS,
  resumed: ['┊', 'resumed', 'quiet'],
}

/**
 * @param {HTMLElement} section
 * @param {{
 *   known: import('figure').Known,
 *   view: import('url_state').View,
 *   onZoom: (x: Range|null|undefined, rows: Record<string, Range|null>) => void,
 *   onHide: (hidden: string[]) => void,
 *   onFold: (group: string, isFolded: boolean) => void,
 *   arrangement: {order: string[], sizes: Record<string, import('panel_layout').Size>},
 *   onArrange: () => void,
 *   onSeen: () => void
 * }} options
 * onZoom gets the axes that changed, rows by name; null: all there is; onSeen: other panels have come into view
 * @typedef {import('url_state').Range} Range
 */
export const createPanels = (section, { known, view, onZoom, onHide, onFold, arrangement, onArrange, onSeen }) => {
  const layout = createLayout(arrangement, onArrange)
  const hero = section.querySelector('[data-hero]')
  const below = section.querySelector('[data-groups]')
  const blank = /** @type {any} */ (section.querySelector('[data-panel]')).content.firstElementChild
  /** By row. @type {Map<string, Panel>} */
  const panels = new Map()
  /** Elements by group. @type {Map<string, HTMLDetailsElement>} */
  const groups = new Map()
  /** Groups below many panels, which the user has not unfolded. @type {Set<string>} */
  const lower = new Set()
  /** @param {string} group */
  const isFolded = (group) => lower.has(group) || view.collapsed.includes(group)
  /** @type {import('points').Points|null} */
  let points = null
  /** @type {number|null} */
  let pointed = null
  let [arranged, searched] = ['', view.search] // groups and names of the panels, and what they are of

  const at = (x) => {
    pointed = x
    for (const panel of panels.values()) showValues(panel)
  }
  /** @param {Panel} panel */
  const showValues = ({ element, drawn }) => {
    if (!drawn) return
    place(element.querySelector('.crosshair'), drawn, pointed, view.x)
    const values = element.querySelectorAll('.panel-lines b')
    drawn.lines.forEach((line, i) => {
      if (values[i]) values[i].innerHTML = valueAt(line, pointed)
    })
  }
  /**
   * Show a button for each line with its colour, name and value; a pressed button hides its line.
   * @param {Panel} panel
   */
  const showLegend = (panel) => {
    const list = panel.element.querySelector('.panel-lines')
    const names = panel.drawn.lines.map(({ name }) => name)
    const signs = [
      ...panel.drawn.marks
        .filter(({ name, x }) => x.length && name in (panel.row.group ? NONFINITE_SIGNS : SIGNS))
        .map(({ name }) => SIGNS[name]),
      ...(panel.drawn.outliers ? [['↕', panel.drawn.outliers, 'quiet']] : []),
    ]
    const isNarrow = names.length > 1 && panel.drawn.axis.pixels < NARROW
    list.toggleAttribute('data-narrow', isNarrow)
    const key = JSON.stringify([isNarrow, names, signs])
    if (list.dataset.key !== key) {
      list.dataset.key = key
      list.replaceChildren(
        ...names.map((name) => {
          if (names.length === 1 && !shortened(name, panel.row))
            return made('span', { className: 'value', title: name }, made('b'))
          const button = made(
            'button',
            { type: 'button', className: 'ghost', title: name },
            made('i'),
            made('span', {
              className: 'cut',
              textContent: isNarrow ? briefly(name, panel.row) : shortened(name, panel.row),
            }),
            made('b'),
          )
          button.addEventListener('click', () => {
            const hidden = new Set(view.hidden)
            if (!hidden.delete(name)) hidden.add(name)
            onHide([...hidden])
          })
          return button
        }),
        ...signs.map(([sign, label, className = '']) =>
          made('span', { className: 'sign', title: label }, made('i', { textContent: sign, className }), label),
        ),
      )
    }
    panel.drawn.lines.forEach(({ name, color, opacity }, i) => {
      const button = /** @type {any} */ (list.children[i])
      if (button.matches('.value')) return
      button.setAttribute('aria-pressed', String(!view.hidden.includes(name)))
      Object.assign(button.firstChild.style, { background: color, opacity })
    })
    showValues(panel)
  }

  /**
   * Parts of a panel, whose plot draws whichever panel they are in.
   * @param {Found} element that has them
   * @returns {Shell}
   */
  const createShell = (element) => {
    const plot = element.querySelector('.plot')
    const panelOf = () => /** @type {Panel} */ (panels.get(plot.closest('.chart-panel')?.dataset.row ?? ''))
    const compose = (_, colors, size) => {
      const panel = panelOf()
      panel.drawn = figure(panel.row, /** @type {any} */ (points), view, colors, size)
      showLegend(panel)
      plot.style.visibility = ''
      return { ...panel.drawn, isFitted: true }
    }
    const draw = painter(plot, compose, () => {
      plot.querySelector('[data-static-chart]')?.remove()
      delete panelOf().element.querySelector('.panel-lines').dataset.fragment
      plot.on('plotly_relayout', (change) => {
        const zoom = zoomed(change, panelOf().row.name, plot)
        if (zoom) onZoom(zoom.x, zoom.rows)
      })
    })
    plot.addEventListener('mousemove', (event) => {
      const { drawn } = panelOf()
      const x = drawn && pointedAt(event, plot, drawn)
      at(x === null ? null : snapped(drawn, x))
    })
    plot.addEventListener('mouseleave', () => at(null))
    layout.attach(element.querySelector('[data-move]'), element.querySelector('[data-resize]'))
    return { parts: [...element.children], plot, draw: () => draw({}) }
  }
  /** Parts of panels that have left the view, for those that come into it. @type {Shell[]} */
  const free = []
  /** Panels that were in use when they left the view. @type {Set<Panel>} */
  const used = new Set()
  /** Give a panel its parts. @param {Panel} panel */
  const mount = (panel) => {
    const { element, row } = panel
    used.delete(panel)
    if (panel.shell) return
    const shell = free.pop()
    if (shell) element.replaceChildren(...shell.parts)
    else if (!element.querySelector('.tools')) element.replaceChildren(...blank.cloneNode(true).children)
    const { plot } = (panel.shell = shell ?? createShell(element))
    plot.dataset.plot = row.name
    plot.setAttribute('aria-label', `${row.title} by step`)
    element.querySelector('h3').replaceWith(titled(row))
    element.querySelector('[data-full]').setAttribute('aria-label', `${row.title}: full screen`)
    element.querySelector('[data-more]').setAttribute('aria-label', `${row.title}: more`)
    layout.showHandles(element)
    draw(panel)
  }
  /** @param {Panel} panel */
  const unmount = (panel) => {
    const { element, row, shell } = panel
    if (!shell) return
    const isInUse = element.contains(document.activeElement) || element === document.fullscreenElement
    if (isInUse) return used.add(panel)
    used.delete(panel)
    const list = element.querySelector('.panel-lines')
    list.replaceChildren()
    delete list.dataset.key
    element.querySelector('.crosshair').hidden = true
    element.replaceChildren(...blanksOf(row))
    shell.plot.style.visibility = 'hidden' // what it shows is of this panel
    delete shell.plot.dataset.drawn
    free.push(shell)
    Object.assign(panel, { shell: null, drawn: null })
  }
  /** Return the contents of a panel out of view. @param {import('figure').Row} row */
  const blanksOf = (row) => [made('header', {}, titled(row)), made('div', { className: 'plot' })]
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const panel = panels.get(/** @type {HTMLElement} */ (target).dataset.row ?? '')
        if (panel?.element !== target) continue
        if (isIntersecting) mount(panel)
        else unmount(panel)
      }
      used.forEach(unmount)
      onSeen()
    },
    { rootMargin: '50% 0px' },
  )
  /** Draw a panel, once its points are here. @param {Panel} panel */
  const draw = ({ row, shell }) => {
    if (shell && points && (!row.metric || points.metrics.has(row.metric))) shell.draw()
  }
  /** @param {import('figure').Row} row @returns {Panel} */
  const create = (row) => {
    const element =
      hero.querySelector(`[data-row="${CSS.escape(row.name)}"]`) ??
      made('section', { className: 'chart-panel', tabIndex: 0 }, ...blanksOf(row))
    element.dataset.row = row.name
    element.tabIndex = 0
    element.setAttribute('aria-label', row.title)
    return { element, row, shell: null, drawn: null }
  }
  /** Where the panels of a group are. @param {string} group @param {import('figure').Row[]} rows */
  const boxOf = (group, rows) => {
    if (!group) return hero
    if (!groups.has(group)) {
      const box = made(
        'details',
        { className: 'panel-group' },
        made('summary', {}, titleOf(group), made('span', { className: 'quiet' })),
        made('div', { className: 'panel-grid' }),
      )
      box.dataset.group = group
      box.addEventListener('toggle', () => {
        if (view.search || box.open !== isFolded(group)) return
        lower.delete(group)
        onFold(group, !box.open)
      })
      const above = below.querySelectorAll('.chart-panel').length
      const own = rows.filter((row) => row.group === group).length
      if (group !== 'pinned' && above && above + own > OPEN) lower.add(group)
      groups.set(group, box)
      below.append(box)
    }
    return groups.get(group)?.querySelector('.panel-grid')
  }
  /** Have a panel for each row, the new ones at the end of their groups. @param {import('figure').Row[]} rows */
  const arrange = (rows) => {
    const wanted = new Set(rows.map(({ name }) => name))
    for (const [name, panel] of panels) {
      const { element } = panel
      if (wanted.has(name)) continue
      seen.unobserve(element)
      element.remove()
      unmount(panel)
      panels.delete(name)
    }
    for (const row of rows) {
      const panel = panels.get(row.name) ?? create(row)
      panels.set(row.name, panel)
      const box = boxOf(row.group, rows)
      if (panel.element.parentElement !== box) box?.append(panel.element)
      if (row.group) seen.observe(panel.element)
      else mount(panel)
    }
    for (const [group, box] of groups) {
      const number = rows.filter((row) => row.group === group).length
      if (!number) {
        box.remove()
        groups.delete(group)
        continue
      }
      box.open = Boolean(view.search) || !isFolded(group) // what was found is to be seen
      layout.arrange(box.querySelector('.panel-grid'))
      box.querySelector('summary .quiet').textContent = number === 1 ? '1 panel' : `${number} panels`
    }
    const names = [...new Set(['pinned', ...rows.map(({ group }) => group)])]
    const boxes = names.flatMap((name) => groups.get(name) ?? [])
    if (boxes.some((box, i) => box !== below.children[i])) below.append(...boxes) // a group that came late
  }

  return {
    /** @param {import('points').Points} newest */
    draw: (newest) => {
      points = newest
      const rows = rowsOf(newest, view, known).filter(
        ({ has, group, title }) => has && (['', 'pinned'].includes(group) || isFound(view.search ?? '', title)),
      )
      const names = rows.map(({ name, group }) => `${group} ${name}`).join('\n')
      if (names !== arranged) {
        arranged = names
        if (view.search === searched) still(() => arrange(rows))
        else arrange(rows) // for who types
        searched = view.search
        const isFirst = section.dataset.rows === undefined
        section.dataset.rows = ''
        // What stands below the panels was not there to scroll to.
        if (isFirst && location.hash)
          section.parentElement?.querySelector(`:scope > #${CSS.escape(location.hash.slice(1))}`)?.scrollIntoView()
      }
      for (const row of rows) {
        const panel = panels.get(row.name)
        if (!panel) continue
        if (panel.row.group !== row.group) panel.element.querySelector('h3').replaceWith(titled(row))
        panel.row = row
      }
      for (const panel of panels.values()) draw(panel)
    },
    panelOf: (row) => panels.get(row),
    /** Metrics of the panels in view. */
    seen: () => [...panels.values()].flatMap(({ row, shell }) => (shell && row.metric ? [row.metric] : [])),
    /** Fold or unfold all groups; the pinned panels stay in view. @param {boolean} isFolded */
    fold: (isFolded) => {
      for (const [name, box] of groups) if (name !== 'pinned') box.open = !isFolded
    },
    /** @param {string} name @param {'png'|'svg'} format @param {string} row */
    savePicture: (name, format, row) => {
      const panel = panels.get(row)
      if (!panel?.shell || !panel.drawn || !window.Plotly) return
      const { layout, axis } = panel.drawn
      const background = getComputedStyle(panel.element).backgroundColor
      savePicture(
        panel.shell.plot,
        name.replaceAll('/', '-'),
        {
          margin: { l: 62, r: 22, t: 36, b: 46 },
          paper_bgcolor: background,
          title: { text: panel.drawn.title, font: { size: 13 }, x: 0.02 },
          height: layout.height + 60,
          xaxis: { ...layout.xaxis, title: { text: axis.title, standoff: 6 } },
        },
        format,
      )
    },
  }
}
