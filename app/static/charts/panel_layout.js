// Size and order of the panels of a group: by dragging their handles, or by arrow keys on these.

const [LOWEST, HIGHEST, STEP] = [120, 800, 10] // pixels of a plot
const USUAL = 170 // as in run.css
/** Columns of a width; as many as there are, for 'full'. @type {Record<string, number>} */
const COLUMNS = { '': 1, half: 2, full: 9 }
const WIDTHS = Object.keys(COLUMNS)
const WORDS = { '': '1 column', half: '2 columns', full: 'full width' }

/** @typedef {{width: string, height: number}} Size of a panel; height: of its plot */

/** What was kept of sizes, by panel. @param {any} kept @returns {Record<string, Size>} */
export const readSizes = (kept) =>
  Object.fromEntries(
    Object.entries(kept && typeof kept === 'object' ? kept : {})
      .filter(([, size]) => WIDTHS.includes(size?.width) && size.height >= LOWEST && size.height <= HIGHEST)
      .slice(0, 200),
  )

/** @param {number} height */
const bounded = (height) => Math.min(Math.max(Math.round(height / STEP) * STEP, LOWEST), HIGHEST)

/**
 * @param {{order: string[], sizes: Record<string, Size>}} arrangement which is changed
 * @param {() => void} onChange
 */
export const createLayout = ({ order, sizes }, onChange) => {
  /** @param {HTMLElement} element */
  const rowOf = (element) => element.dataset.row ?? ''
  /**
   * One of the first panels, which are as wide as there is room and share the height of the window.
   * @param {HTMLElement} element
   */
  const isHero = (element) => Boolean(element.closest('[data-hero]'))
  /** @param {HTMLElement} element @returns {Size} */
  const sizeOf = (element) =>
    sizes[rowOf(element)] ?? {
      width: '',
      height: isHero(element) ? bounded(element.querySelector('.plot').clientHeight) : USUAL,
    }
  /** @param {Found} element */
  const gridOf = (element) => element.closest('.panel-grid')

  /** @param {HTMLElement} element */
  const showSize = (element) => {
    const { width, height } = sizeOf(element)
    if (!isHero(element)) element.dataset.width = width
    if (!isHero(element) || rowOf(element) in sizes) element.style.setProperty('--height', `${height}px`)
    else element.style.removeProperty('--height')
    element
      .querySelector('[data-resize]')
      ?.setAttribute(
        'aria-label',
        `Resize ${element.getAttribute('aria-label')}: ${isHero(element) ? '' : `${WORDS[width]}, `}${height} px`,
      )
  }
  /** @param {Found} mover */
  const showPlace = (mover) => {
    const element = mover.closest('.chart-panel')
    const all = [...element.parentElement.children]
    mover.setAttribute(
      'aria-label',
      `Move ${element.getAttribute('aria-label')}: ${all.indexOf(element) + 1} of ${all.length}`,
    )
  }
  /** Have the panels of a group in their order. @param {Found} grid */
  const arrange = (grid) => {
    const ranks = new Map(order.map((name, i) => [name, i]))
    const rank = (/** @type {HTMLElement} */ element) => ranks.get(rowOf(element)) ?? Infinity
    const elements = [...grid.children]
    const sorted = [...elements].sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)))
    if (sorted.some((element, i) => element !== elements[i])) grid.append(...sorted)
    for (const element of sorted) showSize(element)
    for (const mover of grid.querySelectorAll('[data-move]')) showPlace(mover)
  }
  /** @param {Found} element @param {Size} size */
  const resize = (element, size) => {
    const { width, height } = sizeOf(element)
    if (width === size.width && height === size.height) return
    sizes[rowOf(element)] = isHero(element) ? { ...size, width: '' } : size
    show(element)
    onChange()
  }
  /** @param {Found} element */
  const show = (element) => {
    if (isHero(element)) showSize(element)
    else arrange(gridOf(element))
  }
  /** Put a panel at a place of its group. @param {Found} element @param {number} place */
  const move = (element, place) => {
    const grid = gridOf(element)
    const names = [...grid.children].map(rowOf).filter((name) => name !== rowOf(element))
    if (place < 0 || place > names.length) return
    names.splice(place, 0, rowOf(element))
    order.splice(0, Infinity, ...order.filter((name) => !names.includes(name)), ...names)
    const focused = document.activeElement
    arrange(grid)
    if (element.contains(focused)) /** @type {HTMLElement} */ (focused).focus({ preventScroll: true })
    onChange()
  }

  /**
   * A drag by a handle.
   * @param {Found} handle
   * @param {(event: PointerEvent) => (event: PointerEvent) => void} begin what to do with each movement
   */
  const onDrag = (handle, begin) =>
    handle.addEventListener('pointerdown', (event) => {
      if (event.button) return
      event.preventDefault()
      handle.focus({ preventScroll: true })
      const step = begin(event)
      const end = () => {
        document.removeEventListener('pointermove', step)
        for (const name of ['pointerup', 'pointercancel']) document.removeEventListener(name, end)
      }
      document.addEventListener('pointermove', step)
      for (const name of ['pointerup', 'pointercancel']) document.addEventListener(name, end)
    })
  /** @param {Found} handle @param {Record<string, () => void>} keys */
  const onKeys = (handle, keys) =>
    handle.addEventListener('keydown', (event) => {
      const act = !event.ctrlKey && !event.metaKey && !event.altKey && keys[event.key]
      if (!act) return
      event.preventDefault()
      act()
    })

  /** Make handles work, of whichever panel they are in. @param {Found} mover @param {Found} resizer */
  const attach = (mover, resizer) => {
    const panel = () => resizer.closest('.chart-panel')
    const wider = (by) => {
      const element = panel()
      const { width, height } = sizeOf(element)
      resize(element, { width: WIDTHS[WIDTHS.indexOf(width) + by] ?? width, height })
    }
    const higher = (by) => {
      const element = panel()
      const { width, height } = sizeOf(element)
      resize(element, { width, height: bounded(height + by) })
    }
    onKeys(resizer, {
      ArrowRight: () => wider(1),
      ArrowLeft: () => wider(-1),
      ArrowDown: () => higher(2 * STEP),
      ArrowUp: () => higher(-2 * STEP),
    })
    onDrag(resizer, ({ clientX, clientY }) => {
      const element = panel()
      const { width, height } = sizeOf(element)
      if (isHero(element))
        return (event) => resize(element, { width, height: bounded(height + event.clientY - clientY) })
      const [begin, groups] = [element.offsetWidth, element.closest('.panel-groups')]
      const column = groups.clientWidth / Number(getComputedStyle(groups).getPropertyValue('--columns'))
      return (event) => {
        const columns = (begin + event.clientX - clientX) / column
        resize(element, {
          width: columns > 2.3 ? 'full' : columns > 1.3 ? 'half' : '',
          height: bounded(height + event.clientY - clientY),
        })
      }
    })
    resizer.addEventListener('dblclick', () => {
      const element = panel()
      delete sizes[rowOf(element)]
      show(element)
      onChange()
    })
    const by = (places) => {
      const element = panel()
      move(element, [...gridOf(element).children].indexOf(element) + places)
    }
    const [before, after] = [() => by(-1), () => by(1)]
    onKeys(mover, { ArrowLeft: before, ArrowUp: before, ArrowRight: after, ArrowDown: after })
    onDrag(mover, () => ({ clientX, clientY }) => {
      const element = panel()
      const other = /** @type {Found} */ (document.elementFromPoint(clientX, clientY))?.closest('.chart-panel')
      if (other && other !== element && other.parentElement === element.parentElement)
        move(element, [...other.parentElement.children].indexOf(other))
    })
  }
  /** Show the size and place of a panel that has handles now. @param {Found} element */
  const showHandles = (element) => {
    showSize(element)
    if (!isHero(element)) showPlace(element.querySelector('[data-move]'))
  }
  return { attach, arrange, showHandles }
}
