// The panels of a run's charts: one figure each, in groups that fold, with a legend of values.
import { NONFINITE_SIGNS } from 'annotations'
import { painter, savePicture, zoomed } from 'charts'
import { place, pointedAt, snapped, valueAt } from 'crosshair'
import { figure, GROUPS, rowsOf } from 'figure'
import { still } from 'dom_updates'
import { createLayout } from 'panel_layout'

/** row: what it shows. drawn: its figure. @typedef {{element: HTMLElement, row: import('figure').Row, plot: Found, draw: () => void, drawn: any}} Panel */

/** @param {string} tag @param {Record<string, any>} [fields] @param {(Node|string)[]} children @returns {any} */
const made = (tag, fields = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), fields)
  element.append(...children)
  return element
}

/** @param {string} group */
const titleOf = (group) => GROUPS[group] ?? (group === '/' ? 'Metrics' : group.slice(0, -1))

/** What marks of single steps look like and mean; a class where they are not red. @type {Record<string, [string, string, string?]>} */
const SIGNS = { skipped: ['|', 'skipped step'], 'loss spike': ['◆', 'loss spike'], ...NONFINITE_SIGNS, resumed: ['┊', 'resumed', 'quiet'] }

/**
 * @param {HTMLElement} section
 * @param {{known: import('figure').Known, view: import('url_state').View, onZoom: (x: Range|null|undefined, rows: Record<string, Range|null>) => void, onHide: (hidden: string[]) => void, onFold: (group: string, isFolded: boolean) => void, arrangement: {order: string[], sizes: Record<string, import('panel_layout').Size>}, onArrange: () => void}} options
 * onZoom gets the axes that changed, rows by name; null: all there is
 * @typedef {import('url_state').Range} Range
 */
export const createPanels = (section, { known, view, onZoom, onHide, onFold, arrangement, onArrange }) => {
  const layout = createLayout(arrangement, onArrange)
  const hero = section.querySelector('[data-hero]')
  const below = section.querySelector('[data-groups]')
  const blank = /** @type {any} */ (section.querySelector('[data-panel]')).content.firstElementChild
  /** By row. @type {Map<string, Panel>} */
  const panels = new Map()
  /** By group. @type {Map<string, HTMLDetailsElement>} */
  const groups = new Map()
  /** @type {import('points').Points|null} */
  let points = null
  /** @type {number|null} */
  let pointed = null

  const at = (x) => {
    pointed = x
    for (const panel of panels.values()) showValues(panel)
  }
  /** @param {Panel} panel */
  const showValues = ({ element, drawn }) => {
    place(element.querySelector('.crosshair'), drawn, pointed, view.x)
    if (!drawn) return
    const values = element.querySelectorAll('.panel-lines b')
    drawn.lines.forEach((line, i) => { if (values[i]) values[i].innerHTML = valueAt(line, pointed) })
  }
  /** A button a line: its colour, name and value; pressed, the line is hidden. @param {Panel} panel */
  const showLegend = (panel) => {
    const list = panel.element.querySelector('.panel-lines')
    const names = panel.drawn.lines.map(({ name }) => name)
    const signs = [...panel.drawn.marks.filter(({ name, x }) => x.length && name in (panel.row.group ? NONFINITE_SIGNS : SIGNS)).map(({ name }) => SIGNS[name]), ...(panel.drawn.outliers ? [['↕', panel.drawn.outliers, 'quiet']] : [])]
    if ([...list.children].map(({ title }) => title).join('\n') !== [...names, ...signs.map(([, label]) => label)].join('\n')) {
      list.replaceChildren(...names.map((name) => {
        const button = made('button', { type: 'button', className: 'ghost', title: name }, made('i'), name, made('b'))
        button.addEventListener('click', () => {
          const hidden = new Set(view.hidden)
          if (!hidden.delete(name)) hidden.add(name)
          onHide([...hidden])
        })
        return button
      }), ...signs.map(([sign, label, className = '']) => made('span', { className: 'sign', title: label }, made('i', { textContent: sign, className }), label)))
    }
    panel.drawn.lines.forEach(({ name, color }, i) => {
      const button = /** @type {any} */ (list.children[i])
      button.setAttribute('aria-pressed', String(!view.hidden.includes(name)))
      button.firstChild.style.background = color
    })
    showValues(panel)
  }

  /** @param {import('figure').Row} row @returns {Panel} */
  const create = (row) => {
    const element = hero.querySelector(`[data-row="${CSS.escape(row.name)}"]`) ?? blank.cloneNode(true)
    const plot = element.querySelector('.plot')
    const [full, more] = ['[data-full]', '[data-more]'].map((name) => element.querySelector(name))
    element.dataset.row = plot.dataset.plot = row.name
    element.tabIndex = 0
    element.setAttribute('aria-label', row.title)
    Object.assign(element.querySelector('h3'), { textContent: row.title, title: row.title })
    plot.setAttribute('aria-label', `${row.title} by step`)
    full.setAttribute('aria-label', `${row.title}: full screen`)
    more.setAttribute('aria-label', `${row.title}: more`)
    layout.attach(element)
    full.addEventListener('click', () => element.requestFullscreen())
    element.addEventListener('keydown', (event) => {
      if (event.key.toLowerCase() === 'f' && event.target === element && !event.ctrlKey && !event.metaKey && !event.altKey) element.requestFullscreen()
    })
    /** @type {Panel} */
    const panel = { element, row, plot, drawn: null, draw: () => paint({}) }
    const compose = (_, colors, size) => {
      panel.drawn = figure(panel.row, /** @type {any} */ (points), view, colors, size)
      showLegend(panel)
      return { ...panel.drawn, isFitted: true }
    }
    const paint = painter(plot, compose, () => {
      plot.querySelector('[data-static-chart]')?.remove()
      delete element.querySelector('.panel-lines').dataset.fragment
      plot.on('plotly_relayout', (change) => {
        const zoom = zoomed(change, [row.name])
        if (zoom) onZoom(zoom.x, zoom.rows)
      })
    })
    plot.addEventListener('mousemove', (event) => {
      const x = panel.drawn && pointedAt(event, plot, panel.drawn)
      at(x === null ? null : snapped(panel.drawn, x))
    })
    plot.addEventListener('mouseleave', () => at(null))
    return panel
  }
  /** Where the panels of a group are. @param {string} group */
  const boxOf = (group) => {
    if (!group) return hero
    if (!groups.has(group)) {
      const box = made('details', { className: 'panel-group', open: !view.collapsed.includes(group) },
        made('summary', {}, titleOf(group), made('span', { className: 'quiet' })), made('div', { className: 'panel-grid' }))
      box.dataset.group = group
      box.addEventListener('toggle', () => onFold(group, !box.open))
      groups.set(group, box)
      below.append(box)
    }
    return groups.get(group)?.querySelector('.panel-grid')
  }
  /** Have a panel for each row, the new ones at the end of their groups. @param {import('figure').Row[]} rows */
  const arrange = (rows) => {
    const wanted = new Set(rows.map(({ name }) => name))
    for (const [name, { element }] of panels) {
      if (wanted.has(name)) continue
      element.remove()
      panels.delete(name)
    }
    for (const row of rows) {
      const panel = panels.get(row.name) ?? create(row)
      panels.set(row.name, panel)
      const box = boxOf(row.group)
      if (panel.element.parentElement !== box) box?.append(panel.element)
    }
    for (const [group, box] of groups) {
      const number = rows.filter((row) => row.group === group).length
      if (!number) {
        box.remove()
        groups.delete(group)
        continue
      }
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
      const rows = rowsOf(newest, view, known).filter(({ has }) => has)
      const names = rows.map(({ name, group }) => `${group} ${name}`).join('\n')
      if (names !== section.dataset.rows) {
        still(() => arrange(rows))
        const isFirst = !section.dataset.rows
        section.dataset.rows = names
        // What stands below the panels was not there to scroll to.
        if (isFirst && location.hash) section.parentElement?.querySelector(`:scope > #${CSS.escape(location.hash.slice(1))}`)?.scrollIntoView()
      }
      for (const row of rows) Object.assign(panels.get(row.name) ?? {}, { row })
      for (const panel of panels.values()) panel.draw()
    },
    panelOf: (row) => panels.get(row),
    /** @param {string} name @param {'png'|'svg'} format @param {string} row */
    savePicture: (name, format, row) => {
      const panel = panels.get(row)
      if (!panel?.drawn || !window.Plotly) return
      const { layout, axis } = panel.drawn
      const background = getComputedStyle(panel.element).backgroundColor
      savePicture(panel.plot, name.replaceAll('/', '-'), {
        margin: { l: 62, r: 22, t: 36, b: 46 }, paper_bgcolor: background, title: { text: panel.drawn.title, font: { size: 13 }, x: 0.02 },
        height: layout.height + 60, xaxis: { ...layout.xaxis, title: { text: axis.title, standoff: 6 } },
      }, format)
    },
  }
}
